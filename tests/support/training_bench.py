"""A folder with tiny texts and samples in which the stages of tools/train are run by their own commands."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tools.train.__main__ import main
from tools.train.recipes import FULL, SLIDING, TARGET_CONFIG
from tools.train.samples import Sample, SampleWriter

VOCAB_SIZE = 320
ROW_LENGTH = 64
ANIMALS = ("fox", "dog", "cat", "owl", "bee")
PLACES = ("wood", "sea", "hill", "house")


def story(animal: str, place: str) -> str:
    return f"The {animal} went to the {place}. The {animal} saw the {place} and was happy at the {place}."


def write_texts(folder: Path) -> Path:
    generator = random.Random(0)
    texts = [story(generator.choice(ANIMALS), generator.choice(PLACES)) for _ in range(300)]
    path = folder / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(texts))
    return path


def write_samples(folder: Path) -> Path:
    """As if another model had been asked."""
    writer = SampleWriter(folder, "fake", samples_per_file=100)
    generator = random.Random(1)
    for number in range(240):
        animal, place = generator.choice(ANIMALS), generator.choice(PLACES)
        writer.add(
            Sample(
                kind="story",
                prompt=f"Tell me of {animal} {number % 7} in the {place}",
                answer=story(animal, place),
                prompt_ids=[1],
                answer_ids=[2],
                temperature=0.8,
                finish="stop",
            )
        )
    writer.flush()
    return folder


def tiny_config() -> dict[str, Any]:
    return {
        **TARGET_CONFIG,
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size": 48,
        "hidden_size_per_layer_input": 4,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 24,
        "max_position_embeddings": 128,
    }


class Workbench:
    """The folders of a run, and the commands in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = write_texts(folder)
        self.samples = write_samples(folder / "samples")
        self.run(
            "tokenizer", "--text", self.text, "--vocab-size", VOCAB_SIZE, "--output", folder / "tokenizer"
        )
        (folder / "config.json").write_text(json.dumps(tiny_config()))

    def run(self, *arguments: object) -> None:
        assert main([str(argument) for argument in arguments]) == 0

    def train_target(self, name: str, steps: int, *more: object) -> dict[str, Any]:
        self.run(
            *(
                "target",
                "--text",
                self.text,
                "--samples",
                self.samples,
                "--tokenizer",
                self.folder / "tokenizer",
            ),
            *(
                "--config",
                self.folder / "config.json",
                "--rows",
                8,
                "--row-length",
                ROW_LENGTH,
                "--device",
                "cpu",
            ),
            *("--steps", steps, "--output", self.folder / name, "--state", self.folder / f"{name}-state"),
            *more,
        )
        return report_of(self.folder / name)

    def train_assistant(self, name: str, steps: int, samples: Path, *more: object) -> dict[str, Any]:
        self.run(
            *("assistant", "--target", self.folder / "target", "--samples", samples, "--device", "cpu"),
            *("--hidden-size", 24, "--intermediate-size", 48, "--rows", 8, "--row-length", ROW_LENGTH),
            *(
                "--steps",
                steps,
                "--output",
                self.folder / name,
                "--state",
                self.folder / f"{name}-state",
                *more,
            ),
        )
        return report_of(self.folder / name)

    def sample(self, limit: int) -> Path:
        """What the target writes itself."""
        output = self.folder / "own-text"
        self.run(
            *(
                "sample",
                "--model",
                self.folder / "target",
                "--output",
                output,
                "--kinds",
                "chat",
                "--device",
                "cpu",
            ),
            *(
                "--time-limit",
                600,
                "--limit",
                limit,
                "--max-tokens",
                24,
                "--num-seqs",
                16,
                "--greedy-share",
                0.7,
            ),
            *("--max-model-len", 128),
        )
        return output

    def evaluate(self, assistant: str) -> dict[str, Any]:
        output = self.folder / f"{assistant}.json"
        self.run(
            *(
                "evaluate",
                "--target",
                self.folder / "target",
                "--device",
                "cpu",
                "--num-threads",
                1,
                "--held-out",
            ),
            *(
                "--speculator",
                f"gemma4_mtp,model={self.folder / assistant}",
                "--num-prompts",
                8,
                "--max-tokens",
                24,
            ),
            *("--max-model-len", 128, "--num-seqs", 8, "--batch-sizes", "--output", output),
        )
        figures: dict[str, Any] = json.loads(output.read_text())["acceptance"]
        return figures


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report

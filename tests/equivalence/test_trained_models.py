"""The models under models/: they write the same with and without drafts, alone and together, as transformers does, and
draft as their golden figures say.

The figures stand beside each drafter, as `python -m tools.train evaluate` wrote them on a CPU in float32: same prompts,
same sampling, so that what moves them is rounding, or a fault. Prompts of this kind were held out of training.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.smollm2 import smollm2_gguf
from tools.train import evaluate
from tools.train.evaluate import HELD_OUT_SET, Answers, Asker

MODELS = Path(__file__).parent.parent.parent / "models"
TARGET, ASSISTANT, HEAD = (
    MODELS / name for name in ("tiny-gemma4", "tiny-gemma4-assistant", "smollm2-eagle3")
)
SPECULATOR = f"gemma4_mtp,model={ASSISTANT},positions=last_token"
BAND = 0.05
NUM_PROMPTS, MAX_TOKENS, K = 6, 48, 4
MAX_BYTES = 40_000_000


def read_options(target: Path, speculator: str, output: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    model = ["--target", str(target), "--speculator", speculator, "--output", str(output)]
    place = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--max-model-len", "512"]
    return parser.parse_args([*model, *place, *more, "--batch-sizes"])


@pytest.mark.parametrize("drafter", [ASSISTANT, HEAD], ids=lambda path: path.name)
def test_a_drafter_accepts_as_its_golden_figures_say(drafter: Path, tmp_path: Path) -> None:
    golden: dict[str, Any] = json.loads((drafter / "golden.json").read_text())
    target = TARGET if golden["target"] == TARGET.name else smollm2_gguf()
    speculator = golden["speculators"][0].replace("model=", f"model={MODELS}/")
    sizes = [f"--{name.replace('_', '-')}={golden[name]}" for name in ("num_prompts", "k", "max_tokens")]
    options = read_options(target, speculator, tmp_path / "found.json", "--held-out", *sizes)
    evaluate.run(options)
    found = json.loads(options.output.read_text())["acceptance"]
    assert found.keys() == golden["acceptance"].keys()
    for case, figures in golden["acceptance"].items():
        rates = found[case]["acceptance_by_position"]
        assert rates == pytest.approx(figures["acceptance_by_position"], abs=BAND), case


# ---- the pair ------------------------------------------------------------------------------------------------------


@cache
def pair_prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = evaluate.prompt_sets([], NUM_PROMPTS, True, seed=1)[HELD_OUT_SET]
    return [evaluate.encode(tokenizer, text) for text in texts]


@pytest.fixture(scope="module")
def pair() -> Asker:
    options = read_options(TARGET, SPECULATOR, Path("unused.json"))
    speculators = [evaluate.read_speculator(SPECULATOR, K)]
    return Asker(evaluate.engine_of(options, speculators, NUM_PROMPTS), MAX_TOKENS)


@pytest.fixture(scope="module")
def plain(pair: Asker) -> Answers:
    return pair.ask(pair_prompts(), "none", None, 0.0)


@pytest.mark.parametrize("k", [1, K])
def test_drafts_change_nothing(k: int, pair: Asker, plain: Answers) -> None:
    drafted = pair.ask(pair_prompts(), "gemma4_mtp", k, 0.0)
    assert drafted.texts == plain.texts
    assert sum(item.num_verifier_accepted for item in drafted.observations) > 0


def test_drafts_change_nothing_of_what_is_drawn_by_seeds(pair: Asker) -> None:
    plain = pair.ask(pair_prompts(), "none", None, 0.8)
    assert pair.ask(pair_prompts(), "gemma4_mtp", K, 0.8).texts == plain.texts


def test_a_request_alone_gets_what_it_gets_beside_others(pair: Asker, plain: Answers) -> None:
    alone = [pair.ask([prompt_ids], "gemma4_mtp", K, 0.0).texts[0] for prompt_ids in pair_prompts()]
    assert alone == [plain.texts[index] for index in range(NUM_PROMPTS)]


def test_transformers_writes_the_same_with_and_without_the_assistant(plain: Answers) -> None:
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    assistant = AutoModelForCausalLM.from_pretrained(ASSISTANT, dtype=torch.float32).eval()
    for index, prompt_ids in enumerate(pair_prompts()):
        for helper in (None, assistant):
            ids = torch.tensor([prompt_ids])
            written = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                assistant_model=helper,
            )
            assert written[0, len(prompt_ids) :].tolist() == plain.texts[index]


def test_the_checkout_stays_light() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) < MAX_BYTES

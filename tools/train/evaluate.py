"""Measures drafters through the engine: acceptance by set of prompts, greedy and sampled apart, and tokens per second.

Prompts come from files of {"turns": [text, ...], "set": ...} lines, or are the held-out ones of prompts.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.tokenizer_files import load_hf_tokenizer
from engine.config import EngineConfig, ModelConfig, engine_config
from engine.core import EngineCore
from engine.messages import AddRequest
from engine.params import SamplingParams, SpeculationParams
from engine.stats import SpecObservation
from tools.train import recipes
from tools.train.export import write_json
from tools.train.prompts import PromptSource

HELD_OUT_SET = "held_out_chats"
_NUM_PAIRS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="directory or GGUF file")
    parser.add_argument(
        "--speculator",
        action="append",
        required=True,
        metavar="METHOD[,key=value...]",
        help="as for slipstream serve",
    )
    parser.add_argument("--tokenizer", help="folder; default: the target's own")
    parser.add_argument("--prompts", type=Path, action="append", default=[], help="JSONL; may be given again")
    parser.add_argument("--num-prompts", type=int, default=40, help="of each set")
    parser.add_argument("--held-out", action="store_true", help="also the held-out chat prompts")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument(
        "--num-seqs", type=int, default=16, help="requests at once where time does not matter"
    )
    parser.add_argument(
        "--batch-sizes", type=int, nargs="*", default=[1], help="at which tokens/s are measured"
    )
    parser.add_argument("--kv-cache-gib", type=gibibytes, dest="kv_cache_bytes", help="default: what is free")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--seed", type=int, default=0)


@dataclass
class Answers:
    """Of a run of several requests. `seconds`: of the steps behind the one that computed the last prompt."""

    observations: list[SpecObservation]
    texts: dict[int, list[int]]
    num_decoded: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.num_decoded / self.seconds if self.seconds else 0.0


class Asker:
    """An engine and its requests."""

    def __init__(self, config: EngineConfig, max_tokens: int) -> None:
        self._core = EngineCore(config)
        self._max_tokens = max_tokens
        self._num_asked = 0

    def prepare(self) -> None:
        """Capture every graph, so that none is captured, and nothing launched for want of one, while time is taken."""
        while self._core.prepare():
            pass

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        method: str,
        k: int | None,
        temperature: float,
        *,
        full_length: bool = False,
    ) -> Answers:
        """All prompts at once; `full_length`: every answer has all its tokens, whatever its end."""
        start = self._num_asked
        for index, prompt_ids in enumerate(prompts):
            self._core.handle(
                AddRequest(
                    request_id=str(start + index),
                    prompt_token_ids=list(prompt_ids),
                    params=SamplingParams(
                        max_tokens=self._max_tokens,
                        temperature=temperature,
                        top_p=1.0 if temperature == 0 else 0.95,
                        seed=index,
                        ignore_eos=full_length,
                    ),
                    speculation=SpeculationParams(method=method, num_speculative_tokens=k),
                )
            )
        self._num_asked += len(prompts)
        answers = Answers([], {index: [] for index in range(len(prompts))})
        began_at = 0.0
        while self._core.has_work:
            message = self._core.step()
            for output in message.outputs if message is not None else ():
                answers.observations += output.spec
                answers.texts[int(output.request_id) - start] += output.token_ids
                if began_at:
                    answers.num_decoded += len(output.token_ids)
            now = time.perf_counter()
            if not began_at and all(answers.texts.values()):
                began_at = now
            answers.seconds = now - began_at if began_at else 0.0
        return answers


def acceptance(observations: Sequence[SpecObservation], k: int) -> dict[str, Any]:
    """Acceptance length, and by position: of the verifications with a draft i, those that accepted 0..i."""
    rates = []
    for position in range(k):
        had = [item for item in observations if item.num_drafted > position]
        rates.append(sum(item.num_verifier_accepted > position for item in had) / len(had) if had else 0.0)
    emitted = [item.num_emitted for item in observations]
    return {
        "acceptance_length": round(statistics.fmean(emitted), 4) if emitted else None,
        "acceptance_by_position": [round(rate, 4) for rate in rates],
        "verifications": len(observations),
    }


def run(options: argparse.Namespace) -> None:
    if options.max_tokens < 2:  # the first one comes without drafts, and no time is taken of it
        raise ValueError(f"--max-tokens: got {options.max_tokens}, expected at least 2")
    tokenizer = load_hf_tokenizer(ModelConfig(model=options.target, tokenizer=options.tokenizer))
    sets = prompt_sets(options.prompts, options.num_prompts, options.held_out, options.seed)
    encoded = {name: [encode(tokenizer, text) for text in texts] for name, texts in sets.items()}
    if options.max_model_len is not None:
        room = options.max_model_len - options.max_tokens
        encoded = {name: [ids for ids in prompts if len(ids) <= room] for name, prompts in encoded.items()}
    for name, prompts in encoded.items():
        if not prompts:
            raise ValueError(
                f"prompts of {name}: got none, expected some of at most --max-model-len less --max-tokens"
            )
    speculators = [read_speculator(text, options.k) for text in options.speculator]
    result: dict[str, Any] = {
        "target": Path(options.target).name,
        "speculators": [short_name(speculator) for speculator in speculators],
        "dtype": options.dtype,
        "num_seqs": options.num_seqs,
        "num_prompts": options.num_prompts,
        "k": options.k,
        "max_tokens": options.max_tokens,
        "torch": torch.__version__,
        "seed": options.seed,
        "acceptance": {},
        "speed": {},
    }
    asker = Asker(
        engine_of(options, speculators, max(options.num_seqs, *options.batch_sizes, 1)), options.max_tokens
    )
    methods = [speculator["method"] for speculator in speculators]
    for method, (name, prompts), temperature in itertools.product(methods, encoded.items(), (0.0, 0.8)):
        answers = [
            asker.ask(prompts[at : at + options.num_seqs], method, options.k, temperature)
            for at in range(0, len(prompts), options.num_seqs)
        ]
        figures = acceptance([seen for answer in answers for seen in answer.observations], options.k)
        result["acceptance"][f"{method}, {name}, temperature {temperature}"] = {
            "prompts": len(prompts),
            **figures,
        }
        print(method, name, temperature, figures, flush=True)
        write_json(options.output, result)
    everything = [ids for group in zip(*encoded.values(), strict=False) for ids in group]
    for method, batch_size in itertools.product(methods, options.batch_sizes):
        figures = _speed(asker, everything, method, options.k, batch_size)
        result["speed"][f"{method}, batch {batch_size}"] = figures
        print(method, batch_size, figures, flush=True)
        write_json(options.output, result)


def _speed(
    asker: Asker, prompts: Sequence[Sequence[int]], method: str, k: int, batch_size: int
) -> dict[str, Any]:
    """Tokens per second of greedy decoding, off and on in turns, each pair on its own prompts."""
    endless = itertools.cycle(prompts)
    off, on = [], []
    for pair in range(-1, _NUM_PAIRS):  # the first one warms up
        asked = list(itertools.islice(endless, batch_size))
        rates = {}
        for name in (("none", method), (method, "none"))[pair % 2]:
            answers = asker.ask(asked, name, None if name == "none" else k, 0.0, full_length=True)
            rates[name] = answers.rate
        if pair < 0:
            asker.prepare()
        else:
            off.append(rates["none"])
            on.append(rates[method])
    ratios = [b / a for a, b in zip(off, on, strict=True)]
    return {
        "tokens_per_second_off": round(statistics.median(off), 2),
        "tokens_per_second_on": round(statistics.median(on), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "pairs": len(ratios),
    }


def prompt_sets(paths: Sequence[Path], count: int, held_out: bool, seed: int) -> dict[str, list[str]]:
    """First turns by set, evenly over the file; and held-out chats. Raises ValueError where there are none."""
    sets: dict[str, list[str]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if not entry.get("turns"):
                raise ValueError(f"{path}: got a line with {', '.join(entry)}, expected one with turns")
            sets.setdefault(entry.get("set", path.stem), []).append(entry["turns"][0])
    sets = {name: texts[:: max(len(texts) // count, 1)][:count] for name, texts in sets.items()}
    if held_out:
        prompts = PromptSource(seed, recipes.CHAT_KINDS).take(held_out=True)
        distinct = dict.fromkeys(prompt.text for prompt in itertools.islice(prompts, 4 * count))
        sets[HELD_OUT_SET] = list(distinct)[:count]
    if not sets:
        raise ValueError("prompts: got none, expected --prompts or --held-out")
    return sets


def encode(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def read_speculator(text: str, k: int) -> dict[str, Any]:
    """ "gemma4_mtp,model=DIR,positions=last_token" as the engine's configuration takes it; `k` where it says none.
    Raises ValueError."""
    method, *pairs = text.split(",")
    if not all("=" in pair for pair in pairs):
        raise ValueError(f"--speculator: got {text}, expected METHOD[,key=value...]")
    options = dict(pair.split("=", 1) for pair in pairs)
    return {
        "method": method,
        "model": options.pop("model", None),
        "k": int(options.pop("k", k)),
        "options": options,
    }


def gibibytes(text: str) -> int:
    """The bytes of so many GiB, as an option's type."""
    return int(float(text) * 2**30)


def short_name(speculator: Mapping[str, Any]) -> str:
    """As `serve --speculator` takes it, but for the folder that the model is in."""
    pairs = {"model": Path(speculator["model"] or "").name, "k": speculator["k"], **speculator["options"]}
    return ",".join([speculator["method"], *(f"{key}={value}" for key, value in pairs.items() if value)])


def engine_of(options: argparse.Namespace, speculators: list[dict[str, Any]], num_seqs: int) -> EngineConfig:
    return engine_config(
        model={"model": options.target, "dtype": options.dtype, "tokenizer": options.tokenizer},
        device=options.device,
        num_threads=options.num_threads,
        max_model_len=options.max_model_len,
        cache={"enable_prefix_cache": False, "kv_cache_bytes": options.kv_cache_bytes},
        scheduler={"max_num_seqs": num_seqs, "max_prefill_stall": None},
        speculators=speculators,
        draft_policy="first",
    )

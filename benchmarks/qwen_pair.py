"""Acceptance length of a real pair, against a script that does not know the engine: Qwen2.5-Coder 1.5B and its 0.5B.

The engine writes greedily in batches with the small model as `draft_model`. Then transformers runs both models over
the texts: the small one says which drafts would have been right, the large one how much of a text is its own choice
too (in bfloat16 near ties fall either way). Opt-in: 1.6 GB of downloads, 8 GB of memory; needs `--prompts`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import (
    Options,
    option_parser,
    read_options,
    run_and_write,
    speculation_by_method,
)
from benchmarks.inprocess import Streamed, engine, stream
from benchmarks.prompt_sets import Prompt, add_prompts_option, choose, encode, group_by, read_prompts
from benchmarks.teacher_forced import GreedyReference, simulate
from engine.client.base import EngineClient
from engine.errors import ConfigError
from engine.messages import AddRequest
from engine.params import SamplingParams, SpeculationParams
from server.bench.schema import BenchResult
from tools.fetch_model import resolve

_DTYPE = "bfloat16"
_METHOD = "draft_model"
_KS = (3, 5)
_BATCH = 8
_MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class Plan:
    """What is asked."""

    draft_model: str
    sets: Mapping[str, list[Prompt]]
    max_tokens: int


@dataclass(frozen=True)
class Written:
    """What the engine wrote for one prompt with k drafts."""

    set_name: str
    k: int
    prompt: list[int]
    streamed: Streamed

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The same for the same text after the same prompt: with k = 3 and with k = 5, as a rule."""
        return tuple(self.prompt), tuple(self.streamed.token_ids)


Choices = Mapping[tuple[tuple[int, ...], tuple[int, ...]], list[int]]


async def write(options: Options, plan: Plan) -> list[Written]:
    """All prompts of all sets, with every k."""
    speculator = {"method": _METHOD, "model": plan.draft_model, "k": max(_KS)}
    written = []
    async with engine(
        options, _DTYPE, speculators=[speculator], max_model_len=_MAX_MODEL_LEN, max_num_seqs=_BATCH
    ) as client:
        for name, prompts in plan.sets.items():
            token_ids = await encode(options.model, prompts)
            for k in _KS:
                texts = await asyncio.gather(
                    *(
                        _write_one(client, f"{name}-{k}-{i}", ids, k, plan.max_tokens)
                        for i, ids in enumerate(token_ids)
                    )
                )
                written += [Written(name, k, ids, text) for ids, text in zip(token_ids, texts, strict=True)]
                print(f"{name}, k={k}: the engine has written {len(texts)} texts", flush=True)
    return written


async def _write_one(
    client: EngineClient, request_id: str, token_ids: list[int], k: int, max_tokens: int
) -> Streamed:
    return await stream(
        client,
        AddRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            speculation=SpeculationParams(method=_METHOD, num_speculative_tokens=k),
        ),
    )


def choices_of(model: str, written: Sequence[Written], num_threads: int) -> Choices:
    """What `model` would have written at each position of each text. It is in memory only while this runs."""
    torch.set_num_threads(num_threads)
    reference = GreedyReference(Path(model), getattr(torch, _DTYPE))
    return {key: reference.choices(*key) for key in dict.fromkeys(one.key for one in written)}


def share_equal(written: Sequence[Written], choices: Choices) -> float:
    """Positions at which the model's choice is what stands there."""
    pairs = [
        (token, choice)
        for one in written
        for token, choice in zip(one.streamed.token_ids, choices[one.key], strict=True)
    ]
    return sum(token == choice for token, choice in pairs) / len(pairs)


async def benchmark(options: Options, plan: Plan) -> BenchResult:
    written = await write(options, plan)
    target = choices_of(options.model, written, options.num_threads)
    draft = choices_of(plan.draft_model, written, options.num_threads)
    result = BenchResult(
        benchmark=options.name,
        environment=options.environment(),
        seed=options.seed,
        parameters={
            "model": Path(options.model).name,
            "draft_model": Path(plan.draft_model).name,
            "dtype": _DTYPE,
            "batch": _BATCH,
            "max_tokens": plan.max_tokens,
        },
    )
    for name, prompts in plan.sets.items():
        of_set = [one for one in written if one.set_name == name]
        result.parameters[f"{name}: prompts"] = len(prompts)
        result.parameters[f"{name}: share of tokens that are the target's in transformers"] = share_equal(
            of_set, target
        )
        result.parameters[f"{name}: share of tokens that are the drafter's in transformers"] = share_equal(
            of_set, draft
        )
        for k in _KS:
            _add_case(result, f"{name}, k={k}", [one for one in of_set if one.k == k], draft, plan.max_tokens)
    return result


def _add_case(
    result: BenchResult, case: str, written: Sequence[Written], draft: Choices, max_tokens: int
) -> None:
    """The engine's figures, those of the script, and the difference of their acceptance lengths."""
    seen = speculation_by_method(item for one in written for item in one.streamed.observations)
    expected = speculation_by_method(
        item
        for one in written
        for item in simulate(one.streamed.token_ids, draft[one.key], one.k, max_tokens, _METHOD)
    )
    result.speculation[f"{case}, engine"] = seen
    result.speculation[f"{case}, teacher-forced"] = expected
    (ours,), (theirs,) = seen, expected
    difference = ours.acceptance_length - theirs.acceptance_length
    result.parameters[f"{case}: engine minus teacher-forced"] = difference
    print(f"{case}: {ours.acceptance_length:.3f} and {theirs.acceptance_length:.3f}, {difference:+.3f}")


def chosen_sets(arguments: argparse.Namespace, num_prompts: int) -> dict[str, list[Prompt]]:
    """The prompts of each task that is asked for. Raises ConfigError."""
    by_task = group_by(read_prompts(arguments.prompts), lambda prompt: prompt.task)
    for task in arguments.tasks:
        if task not in by_task:
            raise ConfigError(f"--tasks: got {task!r}, expected some of {', '.join(by_task)}")
    return {task: choose(by_task[task], num_prompts, arguments.seed) for task in arguments.tasks}


def main() -> None:
    parser = option_parser("qwen_pair", __doc__, default_model="qwen-coder-1.5b")
    add_prompts_option(parser)
    parser.add_argument("--draft-model", default="qwen-coder-0.5b", help="default: %(default)s")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["code", "math_word", "mt_bench"],
        help="tasks of the prompt file; default: %(default)s (HumanEval, GSM8K, MT-bench)",
    )
    parser.add_argument("--num-prompts", type=int, help=f"of each task; default: {_BATCH}, quick: 2")
    parser.add_argument("--max-tokens", type=int, help="of each answer; default: 48, quick: 16")
    arguments = parser.parse_args()
    options = read_options(parser, "qwen_pair", arguments)
    num_prompts, max_tokens = (2, 16) if options.quick else (_BATCH, 48)
    try:
        sets = chosen_sets(arguments, arguments.num_prompts or num_prompts)
    except ConfigError as error:
        parser.error(str(error))
    plan = Plan(resolve(arguments.draft_model), sets, arguments.max_tokens or max_tokens)
    run_and_write(options, benchmark(options, plan))


if __name__ == "__main__":
    main()

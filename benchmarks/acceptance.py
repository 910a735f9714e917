"""What speculation brings one stream: acceptance length by draft method and set of prompts, and tokens per second.

Every prompt is asked without drafts, with each fixed method and k, and with "auto", one after the other and in turning
order; a pair is one group of prompts asked both ways. Times run from first token to last. Needs `--prompts`. A further
set is made of the given texts: repeat one of them with an edit, where the output is in the prompt already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import (
    Options,
    compare,
    option_parser,
    read_options,
    run_and_write,
    speculation_by_method,
)
from benchmarks.inprocess import Streamed, engine, stream
from benchmarks.prompt_sets import (
    EDIT_SET,
    Prompt,
    add_prompts_option,
    choose,
    edit_prompts,
    encode,
    group_by,
    read_prompts,
)
from engine.client.base import EngineClient
from engine.errors import ConfigError
from engine.messages import AddRequest
from engine.params import SamplingParams, SpeculationParams
from server.bench.schema import BenchResult, Comparison, SpeculationReport

_DTYPE = "bfloat16"
_METHODS = ("ngram", "suffix")
_MIN_TOKENS = 8  # of an answer: a shorter one has no speed
_WARM_UP = Prompt("warm-up", "warm-up", "Tell me a story about a lighthouse keeper and his cat.")


class Variant(NamedTuple):
    """A way to ask: a draft method and its k."""

    method: str
    k: int | None = None

    @property
    def name(self) -> str:
        return self.method if self.k is None else f"{self.method} k={self.k}"


PLAIN = Variant("none")
AUTO = Variant("auto")


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    num_prompts: int  # of each set
    max_tokens: int
    ks: tuple[int, ...]

    @property
    def fixed(self) -> list[Variant]:
        return [Variant(method, k) for method in _METHODS for k in self.ks]

    @property
    def variants(self) -> list[Variant]:
        return [PLAIN, *self.fixed, AUTO]


@dataclass(frozen=True)
class Answer:
    """One prompt asked in one way."""

    prompt: Prompt
    pair: int
    variant: Variant
    streamed: Streamed


def rates(answers: Sequence[Answer], variant: Variant) -> list[float]:
    """Tokens per second of each pair's prompts together; the first token of an answer is not counted."""
    counts: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for answer in answers:
        if answer.variant == variant:
            counts[answer.pair] = counts.get(answer.pair, 0) + answer.streamed.num_tokens - 1
            seconds[answer.pair] = seconds.get(answer.pair, 0.0) + answer.streamed.decode_seconds
    return [counts[pair] / seconds[pair] for pair in sorted(counts)]


def fastest(answers: Sequence[Answer], variants: Sequence[Variant]) -> Variant:
    """By the seconds of all its answers; as it is chosen by this very run, it looks a little better than it is."""

    def seconds_per_token(variant: Variant) -> float:
        streamed = [answer.streamed for answer in answers if answer.variant == variant]
        return sum(one.decode_seconds for one in streamed) / sum(one.num_tokens - 1 for one in streamed)

    return min(variants, key=seconds_per_token)


def comparisons(set_name: str, answers: Sequence[Answer], plan: Plan) -> list[Comparison]:
    """Each variant against plain decoding, and "auto" against the best fixed one."""
    by_variant = {variant: rates(answers, variant) for variant in plan.variants}
    best = fastest(answers, plan.fixed)
    matches = [(PLAIN, "plain", variant, variant.name) for variant in (*plan.fixed, AUTO)]
    matches.append((best, f"best fixed ({best.name})", AUTO, AUTO.name))
    return [
        compare(f"{set_name}: decoding", "tokens/s", a_name, b_name, (by_variant[a], by_variant[b]))
        for a, a_name, b, b_name in matches
    ]


def acceptance(set_name: str, answers: Sequence[Answer]) -> dict[str, list[SpeculationReport]]:
    """By variant over the set, and over each of its tasks if it has several."""
    by_case: dict[str, list[Answer]] = {}
    for answer in answers:
        by_case.setdefault(f"{set_name}, {answer.variant.name}", []).append(answer)
    if len({answer.prompt.task for answer in answers}) > 1:
        for answer in answers:
            case = f"{set_name}/{answer.prompt.task}, {answer.variant.name}"
            by_case.setdefault(case, []).append(answer)
    observed = {
        case: speculation_by_method(seen for answer in asked for seen in answer.streamed.observations)
        for case, asked in by_case.items()
    }
    return {case: reports for case, reports in observed.items() if reports}


def share_equal_to_plain(answers: Sequence[Answer]) -> float:
    """Answers with drafts whose tokens are those of plain decoding. In bfloat16 a near tie can fall the other way when
    several tokens are computed at once, and then the texts part.
    """
    plain = {answer.prompt: answer.streamed.token_ids for answer in answers if answer.variant == PLAIN}
    drafted = [answer for answer in answers if answer.variant != PLAIN]
    return sum(answer.streamed.token_ids == plain[answer.prompt] for answer in drafted) / len(drafted)


async def ask(
    client: EngineClient, request_id: str, token_ids: list[int], variant: Variant, max_tokens: int
) -> Streamed:
    """Greedily. The salt keeps what `suffix` learns from the answers of other variants away from it."""
    return await stream(
        client,
        AddRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=SamplingParams(max_tokens=max_tokens, min_tokens=_MIN_TOKENS, temperature=0.0),
            speculation=SpeculationParams(method=variant.method, num_speculative_tokens=variant.k),
            cache_salt=variant.name,
        ),
    )


async def measure(
    clients: Mapping[Variant, EngineClient],
    prompts: Sequence[Prompt],
    token_ids: Sequence[list[int]],
    num_pairs: int,
    plan: Plan,
) -> list[Answer]:
    """Ask every prompt in every way; prompt i belongs to pair i modulo `num_pairs`."""
    answers = []
    for i, (prompt, ids) in enumerate(zip(prompts, token_ids, strict=True)):
        first = i % len(plan.variants)
        for variant in (*plan.variants[first:], *plan.variants[:first]):
            request_id = f"{prompt.set_name}-{i}-{variant.name}"
            streamed = await ask(clients[variant], request_id, ids, variant, plan.max_tokens)
            answers.append(Answer(prompt, i % num_pairs, variant, streamed))
    return answers


def prompt_sets(paths: Sequence[Path], plan: Plan, num_pairs: int, seed: int) -> dict[str, list[Prompt]]:
    """The sets of the files, and the one of edits, each cut to what is asked. Raises ConfigError."""
    prompts = read_prompts(paths)
    sets = group_by(prompts, lambda prompt: prompt.set_name)
    sets[EDIT_SET] = edit_prompts(prompts)
    chosen = {name: choose(members, plan.num_prompts, seed) for name, members in sets.items()}
    for name, members in chosen.items():
        if len(members) < num_pairs:
            raise ConfigError(
                f"set {name}: got {len(members)} prompts, expected one for each of {num_pairs} pairs"
            )
    return chosen


async def benchmark(options: Options, sets: Mapping[str, list[Prompt]], plan: Plan) -> BenchResult:
    speculators = [{"method": method, "k": max(plan.ks)} for method in _METHODS]
    result = BenchResult(
        benchmark=options.name,
        environment=options.environment(),
        seed=options.seed,
        parameters={
            "model": Path(options.model).name,
            "dtype": _DTYPE,
            "max_tokens": plan.max_tokens,
        },
    )
    # "auto" has an engine of its own, so that all it knows it has learnt from its own requests.
    async with (
        engine(options, _DTYPE, speculators=speculators, max_num_seqs=1) as fixed,
        engine(options, _DTYPE, speculators=speculators, max_num_seqs=1) as auto,
    ):
        clients = {variant: auto if variant == AUTO else fixed for variant in plan.variants}
        await measure(clients, [_WARM_UP], await encode(options.model, [_WARM_UP]), 1, plan)
        for set_name, prompts in sets.items():
            token_ids = await encode(options.model, prompts)
            answers = await measure(clients, prompts, token_ids, options.num_pairs, plan)
            result.parameters[f"{set_name}: prompts"] = len(prompts)
            result.parameters[f"{set_name}: share of texts equal to plain"] = share_equal_to_plain(answers)
            result.speculation |= acceptance(set_name, answers)
            result.comparisons += comparisons(set_name, answers, plan)
            print(f"{set_name}: {len(answers)} answers", flush=True)
    return result


def main() -> None:
    parser = option_parser("acceptance", __doc__)
    add_prompts_option(parser)
    parser.add_argument("--num-prompts", type=int, help="of each set; default: 40, quick: 7")
    parser.add_argument("--max-tokens", type=int, help="of each answer; default: 40, quick: 24")
    parser.add_argument(
        "--k", type=int, action="append", help="of the fixed methods; default: 3 and 8, quick: 4"
    )
    arguments = parser.parse_args()
    options = read_options(parser, "acceptance", arguments)
    num_prompts, max_tokens, ks = (7, 24, [4]) if options.quick else (40, 40, [3, 8])
    plan = Plan(
        num_prompts=arguments.num_prompts or num_prompts,
        max_tokens=arguments.max_tokens or max_tokens,
        ks=tuple(arguments.k or ks),
    )
    try:
        sets = prompt_sets(arguments.prompts, plan, options.num_pairs, options.seed)
    except ConfigError as error:
        parser.error(str(error))
    run_and_write(options, benchmark(options, sets, plan))


if __name__ == "__main__":
    main()

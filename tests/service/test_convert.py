"""From a protocol request to engine requests: presence, defaults, limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from engine.errors import InvalidRequestError
from engine.params import SamplingParams
from server.convert import GenerationPlan, RequestConverter, choice_ids, read_identity, sampling_defaults
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.text import TextProcessor
from tests.support.fake_engine import MODEL_INFO
from tests.support.server_fixture import tiny_tokenizer

NOT_SAMPLING = {"stop", "text", "stream_interval"}  # `stop` is stop_strings; the others stay in the frontend
PROMPT = pb.TokenIds(ids=[5, 6, 7])
ROOM = MODEL_INFO.max_model_len - 3


async def plan(
    request: pb.GenerateRequest,
    *,
    defaults: dict[str, float] | None = None,
    speculators: dict[str, int] | None = None,
    default_speculator: str | None = None,
) -> GenerationPlan:
    speculators = speculators or {}
    info = msgspec.structs.replace(
        MODEL_INFO,
        speculators=tuple(speculators),
        default_speculator=default_speculator or next(iter(speculators), "none"),
    )
    converter = RequestConverter(
        info,
        TextProcessor(tiny_tokenizer()),
        sampling_defaults=defaults or {},
        speculator_limits=speculators,
    )
    request.token_ids.CopyFrom(PROMPT)
    request_id, num_choices = read_identity(request)
    return await converter.plan(request, choice_ids(request_id, num_choices), arrival_time=1.5)


async def params(request: pb.GenerateRequest, **options: Any) -> SamplingParams:
    return (await plan(request, **options)).requests[0].params


async def test_unset_fields_have_neutral_values() -> None:
    made = await params(pb.GenerateRequest())
    assert made == SamplingParams(max_tokens=ROOM, seed=made.seed)


async def test_unset_fields_have_the_checkpoint_s_defaults() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "eos_token_id": 2}
    defaults = sampling_defaults(config)
    made = await params(pb.GenerateRequest(), defaults=defaults)
    assert made == SamplingParams(max_tokens=ROOM, seed=made.seed, temperature=0.6, top_k=20)


async def test_zero_is_a_value_and_not_the_default() -> None:
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(temperature=0, top_k=0, seed=0, min_p=0),
        output=pb.OutputParams(logprobs=0, skip_special_tokens=False),
    )
    made = await params(request, defaults={"temperature": 0.6, "top_k": 20, "min_p": 0.5})
    assert (made.temperature, made.top_k, made.seed, made.min_p) == (0.0, 0, 0, 0.0)
    assert (made.logprobs, made.skip_special_tokens) == (0, False)


def test_every_scalar_option_of_the_protocol_is_a_field_of_the_engine() -> None:
    for message in (pb.SamplingParams, pb.StoppingParams, pb.OutputParams):
        names = set(message.DESCRIPTOR.fields_by_name)
        assert names - NOT_SAMPLING <= set(SamplingParams.__struct_fields__)


async def test_a_bad_word_may_be_one_character() -> None:
    made = await params(pb.GenerateRequest(sampling=pb.SamplingParams(bad_words=["x"])))
    encoded = [tiny_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in ("x", " x")]
    assert made.bad_words == tuple(map(tuple, encoded))


async def test_the_context_limits_what_is_asked_for() -> None:
    request = pb.GenerateRequest(
        stopping=pb.StoppingParams(max_tokens=2**32 - 1, min_tokens=100_000),
        sampling=pb.SamplingParams(top_k=2**32 - 1),
    )
    made = await params(request)
    assert (made.max_tokens, made.min_tokens, made.top_k) == (ROOM, ROOM, MODEL_INFO.vocab_size)


async def test_choices_differ_by_id_and_seed_only() -> None:
    request = pb.GenerateRequest(request_id="r", n=3, priority=4, sampling=pb.SamplingParams(seed=-5))
    made = (await plan(request)).requests
    assert [choice.request_id for choice in made] == ["r", "r#1", "r#2"]
    assert len({choice.params.seed for choice in made}) == 3
    first = made[0]
    for choice in made[1:]:
        params_alike = msgspec.structs.replace(choice.params, seed=first.params.seed)
        alike = msgspec.structs.replace(choice, request_id=first.request_id, params=params_alike)
        assert alike == first
    assert first.arrival_time == 1.5


@pytest.mark.parametrize(
    ("asked", "method", "num_tokens"),
    [
        (pb.SpeculationParams(), None, None),
        (pb.SpeculationParams(method="none"), "none", None),
        (pb.SpeculationParams(method="auto"), "auto", None),
        (pb.SpeculationParams(num_speculative_tokens=0), "none", 0),
        (pb.SpeculationParams(num_speculative_tokens=4), None, 4),
        (pb.SpeculationParams(method="suffix", num_speculative_tokens=6), "suffix", 6),
        (pb.SpeculationParams(method="auto", num_speculative_tokens=6), "auto", 6),
    ],
)
async def test_speculation_is_passed_on(
    asked: pb.SpeculationParams, method: str | None, num_tokens: int | None
) -> None:
    made = await plan(pb.GenerateRequest(speculation=asked), speculators={"ngram": 4, "suffix": 6})
    speculation = made.requests[0].speculation
    assert (speculation.method, speculation.num_speculative_tokens) == (method, num_tokens)


@pytest.mark.parametrize("method", [None, "ngram"])
async def test_more_drafts_than_the_method_has_are_refused(method: str | None) -> None:
    asked = pb.SpeculationParams(method=method, num_speculative_tokens=5)
    with pytest.raises(InvalidRequestError, match="got 5, expected at most 4"):
        await plan(pb.GenerateRequest(speculation=asked), speculators={"ngram": 4, "suffix": 6})


@pytest.mark.parametrize(("default", "limit"), [("auto", 6), ("ngram", 4), ("none", 0)])
async def test_drafts_of_an_unset_method_are_bounded_by_the_default_s(default: str, limit: int) -> None:
    speculators = {"ngram": 4, "suffix": 6}
    asked = pb.SpeculationParams(num_speculative_tokens=limit)
    made = await plan(
        pb.GenerateRequest(speculation=asked), speculators=speculators, default_speculator=default
    )
    assert made.requests[0].speculation.num_speculative_tokens == limit
    asked = pb.SpeculationParams(num_speculative_tokens=limit + 1)
    with pytest.raises(InvalidRequestError, match=f"expected at most {limit} with method unset"):
        await plan(pb.GenerateRequest(speculation=asked), speculators=speculators, default_speculator=default)


def test_a_request_without_an_id_gets_one_of_its_own() -> None:
    ids = {read_identity(pb.GenerateRequest())[0] for _ in range(100)}
    assert len(ids) == 100
    assert all(len(request_id) <= 128 and request_id.isascii() for request_id in ids)


def test_a_plan_is_frozen() -> None:
    assert dataclasses.fields(GenerationPlan)
    assert GenerationPlan.__dataclass_params__.frozen  # type: ignore[attr-defined]

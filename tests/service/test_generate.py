"""Generate: which messages a stream brings, in which order, and what reaches the engine."""

from __future__ import annotations

import pytest

from engine.messages import FinishInfo, PositionLogprobs, RequestTimes, TokenLogprob
from engine.stats import SpecObservation
from server.convert import choice_seed
from server.pb.slipstream.v1 import generation_pb2 as pb
from tests.support.fake_engine import EOS, FakeEngine
from tests.support.server_fixture import collect, running_server, text_request, texts, tiny_tokenizer

LENGTH = FinishInfo(reason="length")


def ids_of(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def events(messages: list[pb.GenerateResponse]) -> list[str]:
    return [str(message.WhichOneof("event")) for message in messages]


async def test_a_stream_starts_brings_deltas_and_finishes() -> None:
    async with running_server() as server:
        messages = await collect(server.stub.Generate(text_request("the dog", request_id="r1")))
    prompt = ids_of("the dog")
    started, finished = messages[0].started, messages[-1].finished
    assert events(messages) == ["started", *["delta"] * (len(messages) - 2), "finished"]
    assert (started.request_id, started.model, started.prompt_tokens) == ("r1", "tiny", len(prompt))
    assert texts(messages) == "the dog"
    assert [i for message in messages for i in message.delta.token_ids] == [*prompt, EOS]
    assert (finished.reason, finished.eos_token_id) == (pb.FINISH_REASON_STOP, EOS)
    assert finished.usage == pb.Usage(
        prompt_tokens=len(prompt), completion_tokens=len(prompt) + 1, total_tokens=2 * len(prompt) + 1
    )


async def test_started_comes_as_soon_as_the_engine_computes_the_prompt() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        engine.emit("r", num_cached_tokens=2)
        message = await call.read()
        assert message.started.cached_tokens == 2
        engine.emit("r", [5], finish=LENGTH, num_cached_tokens=2)
        rest = await collect(call)
        assert events(rest) == ["delta", "finished"]
        assert rest[-1].finished.usage.cached_tokens == 2


async def test_token_ids_are_used_as_they_are() -> None:
    async with running_server() as server:
        await collect(server.stub.Generate(pb.GenerateRequest(token_ids={"ids": [5, 6, 7]}, request_id="r")))
        assert server.engine.requests["r"].prompt_token_ids == [5, 6, 7]


async def test_a_chat_is_rendered_with_the_model_s_template() -> None:
    messages = [pb.ChatMessage(role="system", content="be short"), pb.ChatMessage(role="user", content="hi")]
    expected = (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    async with running_server() as server:
        request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages), request_id="r")
        await collect(server.stub.Generate(request))
        assert server.engine.requests["r"].prompt_token_ids == ids_of(expected)


async def test_every_option_reaches_the_engine() -> None:
    async with running_server() as server:
        await collect(
            server.stub.Generate(
                pb.GenerateRequest(
                    request_id="r",
                    model="tiny",
                    text="the dog",
                    priority=-3,
                    cache_salt="tenant",
                    sampling=pb.SamplingParams(
                        temperature=0.5, top_k=7, logit_bias={5: -1.5}, bad_words=["cat"], seed=-9
                    ),
                    stopping=pb.StoppingParams(
                        max_tokens=3, min_tokens=1, stop=["x"], stop_token_ids=[9], include_stop=True
                    ),
                    output=pb.OutputParams(logprobs=2, prompt_logprobs=0),
                    speculation=pb.SpeculationParams(method="none"),
                )
            )
        )
    sent = server.engine.requests["r"]
    assert (sent.priority, sent.cache_salt, sent.speculation.method) == (-3, "tenant", "none")
    params = sent.params
    assert (params.temperature, params.top_k, params.seed, params.logit_bias) == (0.5, 7, -9, {5: -1.5})
    assert params.bad_words == (tuple(ids_of("cat")), tuple(ids_of(" cat")))
    assert (params.max_tokens, params.min_tokens, params.stop_strings) == (3, 1, ("x",))
    assert (params.stop_token_ids, params.include_stop) == ((9,), True)
    assert (params.logprobs, params.prompt_logprobs) == (2, 0)


async def test_logprobs_come_with_ranks_and_text() -> None:
    engine = FakeEngine()
    (the,) = ids_of("the")
    entry = TokenLogprob(token_id=the, logprob=-0.5, rank=1)
    position = PositionLogprobs(token=entry, top=[entry])
    async with running_server(engine) as server:
        call = server.stub.Generate(
            text_request(request_id="r", output=pb.OutputParams(logprobs=1, prompt_logprobs=1))
        )
        await engine.wait_for_request("r")
        engine.emit("r", [the], logprobs=[position], prompt_logprobs=[None, position], finish=LENGTH)
        messages = await collect(call)
    expected = pb.TokenLogprob(token_id=the, logprob=-0.5, rank=1, text="the")
    first, second = messages[0].started.prompt_logprobs
    assert not first.HasField("token")
    assert second.token == expected
    (delta,) = messages[1].delta.logprobs
    assert delta == pb.PositionLogprobs(token=expected, top=[expected])


async def test_stream_interval_gathers_tokens_but_not_the_first_and_the_last() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r", output=pb.OutputParams(stream_interval=3)))
        await engine.wait_for_request("r")
        received = []
        for token_id in range(10, 15):
            engine.emit("r", [token_id])
            if token_id in (10, 13):  # a message is due; read it, so that the engine's outputs do not merge
                received.append(await call.read())
                if token_id == 10:
                    received.append(await call.read())
        engine.emit("r", [15], finish=LENGTH)
        received += await collect(call)
    sizes = [list(message.delta.token_ids) for message in received if message.HasField("delta")]
    assert sizes == [[10], [11, 12, 13], [14, 15]]


async def test_without_text_only_ids_are_sent() -> None:
    async with running_server() as server:
        request = text_request("the dog", output=pb.OutputParams(text=False))
        messages = await collect(server.stub.Generate(request))
    assert texts(messages) == ""
    assert [i for message in messages for i in message.delta.token_ids] == [*ids_of("the dog"), EOS]


async def test_text_waits_for_the_rest_of_a_character() -> None:
    text = "größer 🙂 東"
    async with running_server() as server:
        messages = await collect(server.stub.Generate(text_request(text)))
    assert texts(messages) == text
    assert all("\ufffd" not in message.delta.text for message in messages)


async def test_a_stop_string_is_never_sent() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r", stopping=pb.StoppingParams(stop=["dog"])))
        await engine.wait_for_request("r")
        ids = ids_of("a do") + ids_of("g")
        for token_id in ids[:-1]:
            engine.emit("r", [token_id])
        finish = FinishInfo(reason="stop", stop_string="dog", num_chars_to_drop=3)
        engine.emit("r", ids[-1:], finish=finish)
        messages = await collect(call)
    assert texts(messages) == "a "
    assert messages[-1].finished.stop_string == "dog"
    assert [i for message in messages for i in message.delta.token_ids] == ids


async def test_choices_run_side_by_side_with_seeds_of_their_own() -> None:
    async with running_server() as server:
        call = server.stub.Generate(
            text_request("the dog", request_id="r", n=3, sampling=pb.SamplingParams(seed=42))
        )
        messages = await collect(call)
        sent = server.engine.requests
    assert list(sent) == ["r", "r#1", "r#2"]
    seeds = [request.params.seed for request in sent.values()]
    assert seeds == [42, choice_seed(42, 1), choice_seed(42, 2)]
    assert len(set(seeds)) == 3
    for index in range(3):
        mine = [message for message in messages if message.index == index]
        assert events(mine)[0] == "started"
        assert mine[0].started.request_id == "r"
        assert texts(messages, index) == "the dog"
        assert mine[-1].finished.seed == seeds[index]


async def test_a_seed_is_drawn_and_reported_when_there_is_none() -> None:
    async with running_server() as server:
        seeds = set()
        for name in ("a", "b"):
            messages = await collect(server.stub.Generate(text_request(request_id=name)))
            assert messages[-1].finished.seed == server.engine.requests[name].params.seed
            seeds.add(messages[-1].finished.seed)
    assert len(seeds) == 2


async def test_timing_is_the_engine_s() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        times = RequestTimes(arrival=10.0, first_scheduled=10.5, first_token=11.5, last_token=14.5)
        engine.emit("r", [5], times=times, finish=LENGTH, num_preemptions=2)
        messages = await collect(call)
    assert messages[-1].finished.timing == pb.Timing(
        queue=0.5, prefill=1.0, time_to_first_token=1.5, decode=3.0, total=4.5, preemptions=2
    )


async def test_speculation_statistics_count_what_was_emitted() -> None:
    engine = FakeEngine()
    seen = [
        SpecObservation(
            method="ngram", num_drafted=3, num_verifier_accepted=3, num_accepted=3, num_emitted=4
        ),
        SpecObservation(
            method="ngram", num_drafted=2, num_verifier_accepted=2, num_accepted=1, num_emitted=1
        ),
    ]
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        engine.emit("r", [5, 6, 7, 8], spec=seen[:1])
        engine.emit("r", [EOS], spec=seen[1:], finish=LENGTH)
        messages = await collect(call)
    assert messages[-1].finished.speculation == pb.SpeculationStats(
        method="ngram",
        verifications=2,
        draft_tokens=5,
        accepted_tokens=4,
        acceptance_length=2.5,
        accepted_per_position=[2, 1, 1],
        offered_per_position=[2, 2, 1],
    )


@pytest.mark.parametrize(
    ("methods", "name"), [([], "none"), (["ngram", "ngram"], "ngram"), (["ngram", "eagle"], "mixed")]
)
async def test_speculation_is_named_after_its_method_or_mixed(methods: list[str], name: str) -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        for method in methods:
            seen = SpecObservation(
                method=method, num_drafted=1, num_verifier_accepted=1, num_accepted=1, num_emitted=2
            )
            engine.emit("r", [5, 6], spec=[seen])
        engine.emit("r", [7], finish=LENGTH)
        assert (await collect(call))[-1].finished.speculation.method == name
        count = "slipstream_spec_decode_request_acceptance_length_count"
        assert server.metric(count, model="tiny", method=name) == (1 if methods else None)


@pytest.mark.parametrize("index", [1, 2, 63])
def test_choice_seeds_are_stable_64_bit_numbers(index: int) -> None:
    assert choice_seed(42, index) == choice_seed(42, index)
    assert choice_seed(42, index) != choice_seed(43, index)
    assert -(2**63) <= choice_seed(-1, index) < 2**63


def test_the_seed_of_a_choice_is_the_same_in_every_version() -> None:
    assert [choice_seed(42, index) for index in range(3)] == [42, 6898827997664288301, 354998266460981099]

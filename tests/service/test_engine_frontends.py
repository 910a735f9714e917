"""Several frontends on one engine socket: each gets its own, and none can hurt another."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.control import DumpScheduler, GetSpeculation, SpeculationState
from engine.errors import InvalidRequestError
from engine.frontends import Frontends
from engine.messages import (
    AbortRequests,
    Control,
    ControlAnswer,
    EngineFailed,
    FinishInfo,
    FromEngine,
    Hello,
    LoadProgress,
    RequestOutput,
    RequestRefused,
    StepMessage,
)
from engine.stats import EngineStats
from tests.support.fake_core import FakeCore, fake_config, fake_request

DECODER: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
TIMEOUT_MS = 20_000
MODEL_INFO = FakeCore(fake_config(), lambda progress: None).model_info


class Peer:
    """A frontend with a blocking socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        return DECODER.decode(self.socket.recv())


class Fixture:
    def __init__(self, address: str) -> None:
        self.frontends = Frontends(address)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peers = [Peer(self.context, address) for _ in range(2)]


@pytest.fixture
def engine() -> Iterator[Fixture]:
    with tempfile.TemporaryDirectory() as directory:
        fixture = Fixture(f"ipc://{Path(directory) / 'engine'}")
        yield fixture
        for peer in fixture.peers:
            peer.socket.close()
        fixture.context.term()
        fixture.frontends.close()


def greet(engine: Fixture) -> None:
    engine.frontends.publish(MODEL_INFO)
    for peer in engine.peers:
        peer.send(Hello())
        assert engine.frontends.poll(block=True) == []
        assert peer.receive() == MODEL_INFO


def step(*outputs: RequestOutput) -> StepMessage:
    return StepMessage(outputs=list(outputs), stats=EngineStats(num_running=2))


def output(request_id: str, finish: FinishInfo | None = None) -> RequestOutput:
    return RequestOutput(request_id=request_id, token_ids=[1], finish=finish)


def test_whoever_comes_while_the_engine_loads_sees_progress_and_then_the_model(engine: Fixture) -> None:
    first, second = engine.peers
    first.send(Hello())
    assert engine.frontends.poll(block=True) == []
    progress = LoadProgress(phase="weights", fraction=0.5)
    engine.frontends.publish(progress)
    engine.frontends.publish(MODEL_INFO)
    assert [first.receive(), first.receive()] == [progress, MODEL_INFO]
    second.send(Hello())
    assert engine.frontends.poll(block=True) == []
    assert second.receive() == MODEL_INFO


def test_each_frontend_gets_its_own_outputs_and_the_load_of_all(engine: Fixture) -> None:
    greet(engine)
    for peer, name in zip(engine.peers, "ab", strict=True):
        request = fake_request(name)
        peer.send(request)
        assert engine.frontends.poll(block=True) == [request]
    engine.frontends.publish(step(output("b"), output("a"), output("unknown")))
    for peer, name in zip(engine.peers, "ab", strict=True):
        assert peer.receive() == step(output(name))


def test_the_answer_to_a_control_goes_to_who_asked(engine: Fixture) -> None:
    greet(engine)
    first, second = engine.peers
    controls = [Control("c1", GetSpeculation()), Control("c2", DumpScheduler())]
    for peer, control in zip(engine.peers, controls, strict=True):
        peer.send(control)
        assert engine.frontends.poll(block=True) == [control]
    refusal = RequestRefused.from_error("c2", InvalidRequestError("action", "got what is not known"))
    answer = ControlAnswer("c1", SpeculationState(speculators=(), default_method="none"))
    engine.frontends.publish(refusal)
    engine.frontends.publish(answer)
    assert (first.receive(), second.receive()) == (answer, refusal)


def test_an_id_of_another_frontend_is_refused_until_it_has_finished(engine: Fixture) -> None:
    greet(engine)
    first, second = engine.peers
    first.send(fake_request("r"))
    engine.frontends.poll(block=True)
    second.send(fake_request("r"))
    assert engine.frontends.poll(block=True) == []
    refusal = second.receive()
    assert isinstance(refusal, RequestRefused)
    assert refusal.error == "RequestIdInUseError"
    engine.frontends.publish(step(output("r", FinishInfo(reason="length"))))
    second.send(fake_request("r"))
    assert len(engine.frontends.poll(block=True)) == 1


def test_a_refusal_goes_to_who_asked_and_frees_the_id(engine: Fixture) -> None:
    greet(engine)
    peer = engine.peers[1]
    for _ in range(2):
        peer.send(fake_request("r"))
        assert len(engine.frontends.poll(block=True)) == 1
        engine.frontends.publish(RequestRefused(request_id="r", error="QueueFullError", message="full"))
        assert isinstance(peer.receive(), RequestRefused)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"no msgpack",
        msgspec.msgpack.encode({"type": "AddRequest"}),
        msgspec.msgpack.encode([1]),
    ],
)
def test_a_message_that_cannot_be_read_is_dropped(
    engine: Fixture, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    greet(engine)
    peer = engine.peers[0]
    peer.socket.send(payload)
    assert engine.frontends.poll(block=True) == []
    assert "cannot be read" in caplog.text
    peer.send(fake_request("r"))
    assert len(engine.frontends.poll(block=True)) == 1


def test_requests_of_a_frontend_that_is_gone_are_aborted(engine: Fixture) -> None:
    greet(engine)
    first, second = engine.peers
    for peer, name in [(first, "a"), (second, "b")]:
        peer.send(fake_request(name))
        engine.frontends.poll(block=True)
    first.socket.close()
    commands: list[object] = []
    while not commands:  # until the loss of the connection has come through
        engine.frontends.publish(step(output("a"), output("b")))
        assert second.receive() == step(output("b"))
        commands += engine.frontends.poll(block=False)
    assert commands == [AbortRequests(["a"])]
    engine.frontends.publish(step(output("a", FinishInfo(reason="cancelled")), output("b")))
    assert second.receive() == step(output("b"))


def test_a_failure_before_anybody_came_waits_for_the_first(engine: Fixture) -> None:
    failure = EngineFailed("ConfigError", "device: wrong")
    engine.peers[0].send(Hello())
    engine.frontends.publish(failure)
    assert engine.peers[0].receive() == failure

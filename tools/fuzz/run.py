"""A fuzz run: many cases against each method of a server and against its port, then whether it is as it was."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import hypothesis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from server.bench.environment import current_environment
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.fuzz.connections import conversations, say
from tools.fuzz.methods import Method, methods
from tools.fuzz.report import FuzzReport
from tools.server_log import errors_in_log
from tools.server_process import ServerProcess, descendants
from tools.server_state import held_when_idle, leaks

SERVER_ARGUMENTS = (
    *("--num-threads", "1", "--max-num-seqs", "16", "--max-model-len", "128", "--block-size", "8"),
    *("--kv-cache-memory", "1MiB", "--speculator", "ngram,k=4", "--gateway-protocol", "vllm"),
    *("--max-message-bytes", "1MiB", "--log-format", "json"),
)
_DEADLINE = 2.0  # seconds
_MAX_DESCRIBED = 40
_LOOK_EVERY = 50  # conversations
_SHARE_OF_CONNECTIONS = 0.15
_WEIGHTS = {"GenerationService/Generate": 6, "GenerationService/GenerateOnce": 3, "VllmEngine/Generate": 6}


class Fuzz:
    """Counts what was sent to one server and what came back."""

    def __init__(self, server: ServerProcess, admin_port: int, seed: int) -> None:
        self._server = server
        self._seed = seed
        self._channels = {
            False: grpc.insecure_channel(server.address),
            True: grpc.insecure_channel(f"127.0.0.1:{admin_port}"),
        }
        self.cases: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def methods(self, num: int) -> None:
        """About `num` cases; a message without fields has few."""
        kinds = [(method, *item) for method in methods() for item in method.payloads().items()]
        total = sum(_WEIGHTS.get(method.name, 1) for method, _, _ in kinds)
        for method, kind, payloads in kinds:
            share = num * _WEIGHTS.get(method.name, 1) // total
            self._cases(f"{method.name}: {kind}", share, payloads, partial(self._call, method))

    def connections(self, num: int) -> None:
        """`num` conversations on the port of generation."""

        def talk(case: tuple[bytes, bool]) -> None:
            data, resets = case
            say("127.0.0.1", self._server.port, data, resets=resets)
            if self.cases["connection: bytes"] % _LOOK_EVERY == 0:
                self._look()

        self._cases("connection: bytes", num, st.tuples(conversations(), st.booleans()), talk)
        self._look()

    def _cases(
        self, name: str, num: int, cases: st.SearchStrategy[Any], check: Callable[[Any], None]
    ) -> None:
        @hypothesis.seed(self._seed)
        @hypothesis.settings(
            max_examples=max(1, num),
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(cases)
        def run(case: Any) -> None:
            self.cases[name] += 1
            check(case)

        try:
            run()
        except AssertionError as error:
            self.faults.append(f"{name}: {error}")

    def _call(self, method: Method, payload: bytes) -> None:
        status, details = self._status(method, payload)
        self.statuses[f"{method.name}: {status}"] += 1
        assert method.is_right(status, payload), f"got {status} {details[:200]!r} for {payload[:500]!r}"

    def _status(self, method: Method, payload: bytes) -> tuple[str, str]:
        channel = self._channels[method.is_admin]
        shape = method.shape
        call = getattr(channel, shape)(method.path, request_serializer=bytes, response_deserializer=bytes)
        try:
            answer = call(iter((payload,)) if shape == "stream_stream" else payload, timeout=_DEADLINE)
            if method.descriptor.server_streaming:
                for _ in answer:
                    pass
        except grpc.RpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""

    def _look(self) -> None:
        health = health_pb2_grpc.HealthStub(self._channels[False])
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10.0)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, f"got health {answer.status}"


def run(server: ServerProcess, admin_port: int, num_cases: int, seed: int) -> FuzzReport:
    """The server was started with SERVER_ARGUMENTS, and with this `--admin-port`."""
    _warm_up(server.address)
    processes = descendants(server.pid)
    before = asyncio.run(held_when_idle(server))
    fuzz = Fuzz(server, admin_port, seed)
    try:
        num_connections = int(num_cases * _SHARE_OF_CONNECTIONS)
        fuzz.methods(num_cases - num_connections)
        fuzz.connections(num_connections)
    finally:
        fuzz.close()
    after = asyncio.run(held_when_idle(server, before))
    faults = [*fuzz.faults, *leaks(before, after)]
    if not set(processes) <= set(descendants(server.pid)):
        faults.append("the engine died")
    faults += errors_in_log(server.log_path)
    return FuzzReport(
        environment=current_environment(device="cpu", num_threads=1),
        seed=seed,
        num_cases=fuzz.cases.total(),
        cases=dict(fuzz.cases),
        statuses=dict(sorted(fuzz.statuses.items())),
        before=before,
        after=after,
        num_faults=len(faults),
        faults=faults[:_MAX_DESCRIBED],
    )


def _warm_up(address: str) -> None:
    """The first grammar starts a process that compiles them."""
    with grpc.insecure_channel(address) as channel:
        request = pb.GenerateRequest(text="the dog", json_object=pb.JsonObjectConstraint())
        request.stopping.max_tokens = 1
        for _ in pb_grpc.GenerationServiceStub(channel).Generate(request):
            pass

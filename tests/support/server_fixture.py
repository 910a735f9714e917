"""A whole server in the test's own event loop, over a scripted engine and a tiny tokenizer."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer

from server.app import App, ModelFiles
from server.config import ServerConfig, load_config
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from server.service import SERVICE_NAME
from tests.support.fake_engine import FakeEngine
from tests.support.tiny_models import make_tiny_tokenizer


@cache
def tiny_tokenizer() -> Any:
    """One for all tests: nothing changes it. A test that does makes its own with `make_tiny_tokenizer`."""
    with tempfile.TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(make_tiny_tokenizer(Path(folder)))


def with_template(template: str | None) -> Any:
    """The tiny tokenizer with another chat template."""
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


@dataclass
class RunningServer:
    app: App
    engine: FakeEngine
    channel: grpc.aio.Channel
    ended: asyncio.Task[int]  # the exit status

    @property
    def stub(self) -> Any:
        return pb_grpc.GenerationServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    @property
    def registry(self) -> CollectorRegistry:
        return self.app.registry

    async def is_serving(self, service: str = "") -> bool:
        response = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_for_health(self, status: int, service: str = "") -> None:
        """Follow health Watch until it says so."""
        watch = self.health.Watch(health_pb2.HealthCheckRequest(service=service))
        async for response in watch:
            if response.status == status:
                break
        watch.cancel()

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    async def handled(self, method: str, code: str, service: str = SERVICE_NAME) -> float:
        """Calls of a method that ended so. A client has its status before the server counts the call: waits until
        none of the method's is under way.
        """
        labels = {"grpc_service": service, "grpc_method": method}
        codes = [code.name for code in grpc.StatusCode]
        while True:
            ended = {c: self.metric("grpc_server_handled_total", **labels, grpc_code=c) or 0.0 for c in codes}
            if sum(ended.values()) == self.metric("grpc_server_started_total", **labels):
                return ended[code]
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running_server(
    engine: FakeEngine | None = None,
    *,
    tokenizer: Any = None,
    generation_config: dict[str, Any] | None = None,
    wait_until_ready: bool = True,
    channel_options: Sequence[tuple[str, Any]] = (),
    restart_engine: Callable[[], FakeEngine] | None = None,
    **options: Any,
) -> AsyncIterator[RunningServer]:
    """Serve on a free port. `options` are those of ServerConfig."""
    engine = engine or FakeEngine(echo=True)
    files = ModelFiles(tokenizer or tiny_tokenizer(), generation_config or {})
    app = App(server_config(**options), engine, lambda model: files, restart_engine)
    is_listening = asyncio.Event()
    ended = asyncio.create_task(app.run(is_listening.set))
    listening = asyncio.create_task(is_listening.wait())
    await asyncio.wait({ended, listening}, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        listening.cancel()
        ended.result()
    own_connection = ("grpc.use_local_subchannel_pool", 1)
    target, all_options = f"127.0.0.1:{app.port}", [own_connection, *channel_options]
    async with grpc.aio.insecure_channel(target, options=all_options) as channel:
        server = RunningServer(app, engine, channel, ended)
        try:
            if wait_until_ready:
                await server.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
            yield server
        finally:
            app.stop()
            app.stop()
            with suppress(Exception):
                await ended


def server_config(**options: Any) -> ServerConfig:
    return load_config({"model": "models/tiny", "port": 0, "metrics_port": 0, **options})


def text_request(text: str = "the dog", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)


async def collect(call: Any) -> list[pb.GenerateResponse]:
    """What is left of a stream."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        messages.append(message)
    return messages


def texts(messages: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(message.delta.text for message in messages if message.index == index)


@dataclass
class Failure:
    """A status as a client sees it."""

    code: grpc.StatusCode
    message: str
    details: dict[str, Message]  # by type name

    @property
    def field(self) -> str:
        return str(self.details["BadRequest"].field_violations[0].field)  # type: ignore[attr-defined]

    @property
    def reason(self) -> str:
        return str(self.details["ErrorInfo"].reason)  # type: ignore[attr-defined]


async def failure_of(call: Any) -> Failure:
    """Await a call (read a stream to its end) that must fail."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall | grpc.aio.StreamStreamCall):
            await collect(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return _failure(error)
    raise AssertionError("the call succeeded")


async def run_into_deadline(engine: FakeEngine, call: Callable[[str, float], Any]) -> str:
    """Make the call that `call` makes of a request id and a timeout in seconds, so that its deadline passes while the
    engine has it; the id. On a busy machine a short deadline passes before that: then another one, with more time.
    """
    timeout = 0.05
    while True:
        request_id = f"within {timeout} s"
        failure = await failure_of(call(request_id, timeout))
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
        if request_id in engine.requests:
            return request_id
        timeout *= 2


def _failure(error: grpc.aio.AioRpcError) -> Failure:
    details: dict[str, Message] = {}
    trailers: dict[str, Any] = dict(error.trailing_metadata())  # type: ignore[arg-type]
    status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    if status.details:
        assert (status.code, status.message) == (error.code().value[0], error.details())
    for packed in status.details:
        name = packed.TypeName().rpartition(".")[2]
        details[name] = getattr(error_details_pb2, name)()
        packed.Unpack(details[name])
    return Failure(error.code(), error.details() or "", details)

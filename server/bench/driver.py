"""Sends requests to a server and notes when each message came. Knows clocks and gRPC, no statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc

from server.client import Connection
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc

_STREAMS_PER_CONNECTION = 64  # below the 100 concurrent streams that HTTP/2 peers commonly allow


@dataclass(frozen=True)
class Arrival:
    """Tokens that one message brought."""

    at: float  # time.perf_counter()
    num_tokens: int


@dataclass
class RequestRecord:
    """What happened to one request."""

    due: float  # when it should be sent; latencies count from here, so that a late client cannot hide a queue
    sent: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    ended: float = 0.0
    error: str = ""  # gRPC status name
    message: str = ""  # what the status says
    finished: pb.Finished | None = None

    @property
    def is_completed(self) -> bool:
        return self.finished is not None and not self.error


@asynccontextmanager
async def connect(
    server: Connection | str, num_streams: int
) -> AsyncIterator[list[pb_grpc.GenerationServiceStub]]:
    """Open as many connections as that many streams at once need; yields one stub for each. A text is the address of
    a plain server.
    """
    connection = Connection(server) if isinstance(server, str) else server
    async with AsyncExitStack() as stack:
        stubs = []
        for _ in range(-(-num_streams // _STREAMS_PER_CONNECTION)):
            channel = connection.aio_channel([("grpc.use_local_subchannel_pool", 1)])
            await stack.enter_async_context(channel)
            stubs.append(pb_grpc.GenerationServiceStub(channel))
        yield stubs


async def run_closed_loop(
    stubs: Sequence[pb_grpc.GenerationServiceStub],
    requests: Sequence[pb.GenerateRequest],
    concurrency: int,
    on_done: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    """Keep `concurrency` streams busy until all requests are answered: each sends its next at once."""
    records: list[RequestRecord] = []
    remaining = iter(requests)

    async def stream(stub: pb_grpc.GenerationServiceStub) -> None:
        for request in remaining:
            record = RequestRecord(due=time.perf_counter())
            records.append(record)
            await _send(stub, request, record)
            on_done(record)

    async with asyncio.TaskGroup() as group:
        for i in range(concurrency):
            group.create_task(stream(stubs[i % len(stubs)]))
    return records


async def run_open_loop(
    stubs: Sequence[pb_grpc.GenerationServiceStub],
    requests: Sequence[pb.GenerateRequest],
    arrivals: Sequence[float],
    on_done: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    """Send request i at arrivals[i] seconds, whatever has been answered by then."""
    start = time.perf_counter()
    records = [RequestRecord(due=start + arrival) for arrival in arrivals]

    async def at_its_time(i: int) -> None:
        await asyncio.sleep(records[i].due - time.perf_counter())
        await _send(stubs[i % len(stubs)], requests[i], records[i])
        on_done(records[i])

    async with asyncio.TaskGroup() as group:
        for i in range(len(requests)):
            group.create_task(at_its_time(i))
    return records


async def _send(
    stub: pb_grpc.GenerationServiceStub, request: pb.GenerateRequest, record: RequestRecord
) -> None:
    record.sent = time.perf_counter()
    try:
        async for response in stub.Generate(request):
            now = time.perf_counter()
            match response.WhichOneof("event"):
                case "delta" if response.delta.token_ids:
                    record.arrivals.append(Arrival(now, len(response.delta.token_ids)))
                case "finished":
                    record.finished = response.finished
    except grpc.aio.AioRpcError as error:
        record.error, record.message = error.code().name, error.details() or ""
    record.ended = time.perf_counter()

"""One generation call from admission to its last message, whichever RPC asked for it.

Fans a request out into one engine request per choice and frees all of them in `finally`, however the call
ends. Knows no gRPC: messages go to a Sink, errors are EngineErrors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from structlog.contextvars import bind_contextvars

from engine.client.base import EngineClient, RequestStream
from engine.errors import (
    EngineError,
    InvalidRequestError,
    QueueFullError,
    SlowReaderError,
    UnknownModelError,
)
from engine.messages import AddRequest
from server.choice import ChoiceStream
from server.convert import GenerationPlan, RequestConverter, choice_ids, read_identity
from server.live import LiveCall, LiveCalls
from server.metrics import Metrics
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.text import TextProcessor

REFUSALS = (InvalidRequestError, UnknownModelError, QueueFullError)  # nothing was started
Write = Callable[[pb.GenerateResponse], Awaitable[None]]


class Sink(Protocol):
    """Where the messages of a call go."""

    async def open(self) -> None:
        """Called once, when the request is admitted and before the first message."""

    async def write(self, message: pb.GenerateResponse) -> None: ...


@dataclass(frozen=True)
class Backend:
    """What exists once the engine is ready."""

    client: EngineClient
    text: TextProcessor
    converter: RequestConverter


@dataclass(frozen=True)
class _RunningChoice:
    request: AddRequest
    stream: RequestStream
    messages: ChoiceStream


class Generator:
    """Runs calls side by side; holds nothing of a call once it has ended."""

    def __init__(self, live: LiveCalls, metrics: Metrics) -> None:
        self._live = live
        self._metrics = metrics

    async def run(self, backend: Backend, request: pb.GenerateRequest, sink: Sink) -> None:
        """Write every message of the call. Raises EngineError; what was admitted is freed in any case."""
        arrival_time = time.monotonic()
        try:
            with ExitStack() as stack:
                call, choices = await self._admit(backend, request, arrival_time, stack)
                try:
                    await self._write_all(call, choices, sink)
                finally:
                    _bind_figures(choices)
        except SlowReaderError:
            self._metrics.slow_reader()
            raise
        except REFUSALS as error:
            self._metrics.request_rejected(error.reason)
            raise

    async def _admit(
        self, backend: Backend, request: pb.GenerateRequest, arrival_time: float, stack: ExitStack
    ) -> tuple[LiveCall, list[_RunningChoice]]:
        request_id, num_choices = read_identity(request)
        bind_contextvars(request_id=request_id)
        call = stack.enter_context(self._live.enter(request_id, choice_ids(request_id, num_choices)))
        plan = await backend.converter.plan(request, call.engine_ids, arrival_time)
        streams = _submit(backend.client, plan)
        call.is_submitted = True
        choices = [
            stack.enter_context(self._choice(backend, plan, i, stream)) for i, stream in enumerate(streams)
        ]
        if call.is_aborted:  # while its prompt was tokenized
            backend.client.abort(list(call.engine_ids))
        return call, choices

    @contextmanager
    def _choice(
        self, backend: Backend, plan: GenerationPlan, index: int, stream: RequestStream
    ) -> Iterator[_RunningChoice]:
        request = plan.requests[index]
        renderer = (
            backend.text.renderer(request.prompt_token_ids, request.params) if plan.wants_text else None
        )
        messages = ChoiceStream(
            index,
            request,
            request_id=plan.request_id,
            model_name=backend.client.model_info.model_name,
            renderer=renderer,
            token_text=backend.text.token_text,
            stream_interval=plan.stream_interval,
        )
        self._metrics.choice_started(request.request_id)
        unfinished: str | None = "cancelled"
        try:
            yield _RunningChoice(request, stream, messages)
        except EngineError as error:
            unfinished = None if isinstance(error, REFUSALS) else "error"
            raise
        finally:
            stream.close()
            self._metrics.choice_ended(
                request.request_id,
                unfinished if messages.finish is None else messages.finish.reason,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_tokens=messages.num_tokens,
                times=messages.times,
                speculation=messages.speculation,
            )

    async def _write_all(self, call: LiveCall, choices: list[_RunningChoice], sink: Sink) -> None:
        await call.send(sink.open())
        if len(choices) == 1:
            await self._write_choice(choices[0], lambda message: call.send(sink.write(message)))
            return
        lock = asyncio.Lock()  # the transport takes one message at a time

        async def write_in_turn(message: pb.GenerateResponse) -> None:
            async with lock:
                await call.send(sink.write(message))

        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._write_choice(choice, write_in_turn))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _write_choice(self, choice: _RunningChoice, write: Write) -> None:
        """The loop that runs for every message: nothing in it waits but for the engine and the transport."""
        stream, messages = choice.stream, choice.messages
        is_announced = False
        last_delta_at = 0.0
        while messages.finish is None:
            output = await stream.next()
            num_deltas = messages.num_deltas
            due = messages.add(output)
            if not is_announced and output.times.first_scheduled:
                is_announced = True
                self._metrics.prompt_computed(len(choice.request.prompt_token_ids), output.num_cached_tokens)
            if messages.num_deltas != num_deltas:
                now = time.monotonic()
                if last_delta_at:
                    self._metrics.inter_message.observe(now - last_delta_at)
                last_delta_at = now
            for message in due:
                await write(message)


def _submit(client: EngineClient, plan: GenerationPlan) -> list[RequestStream]:
    """All choices or none."""
    streams: list[RequestStream] = []
    try:
        streams.extend(map(client.submit, plan.requests))  # keeps those before one that is refused
    except EngineError:
        for stream in streams:
            stream.close()
        raise
    return streams


def _bind_figures(choices: list[_RunningChoice]) -> None:
    """What the log of the call says besides its status; never prompt or output."""
    first = choices[0].messages
    times = first.times
    bind_contextvars(
        choices=len(choices),
        prompt_tokens=len(choices[0].request.prompt_token_ids),
        completion_tokens=sum(choice.messages.num_tokens for choice in choices),
        finish=",".join(
            choice.messages.finish.reason if choice.messages.finish else "none" for choice in choices
        ),
        ttft=round(times.first_token - times.arrival, 6) if times.first_token else None,
    )

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
from functools import partial
from typing import Protocol

from structlog.contextvars import bind_contextvars

from engine.client.base import EngineClient, RequestStream
from engine.errors import (
    EngineError,
    InvalidRequestError,
    PermissionDeniedError,
    QueueFullError,
    SlowReaderError,
    UnknownModelError,
)
from engine.messages import AddRequest
from server.admission import Admission
from server.callers import Caller, current_caller
from server.choice import ChoiceStream
from server.content_log import LoggedSink
from server.convert import GenerationPlan, RequestConverter, choice_ids, read_identity
from server.limits import CallerLimits
from server.live import LiveCall, LiveCalls
from server.metrics import Metrics
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.text import TextProcessor
from server.tracing import Tracing

# Nothing was started.
REFUSALS = (InvalidRequestError, UnknownModelError, QueueFullError, PermissionDeniedError)
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
    admission: Admission


@dataclass(frozen=True)
class _RunningChoice:
    request: AddRequest
    stream: RequestStream
    messages: ChoiceStream
    charge: Callable[[int], None]  # for so many tokens of output


@dataclass(frozen=True)
class Arrival:
    """When a call came, when it has to be over (times of time.monotonic()), and whose it is."""

    time: float
    deadline: float | None
    caller: Caller


class Generator:
    """Runs calls side by side; holds nothing of a call once it has ended."""

    def __init__(
        self, live: LiveCalls, metrics: Metrics, tracing: Tracing, *, logs_content: bool = False
    ) -> None:
        self._live = live
        self._metrics = metrics
        self._tracing = tracing
        self._limits = CallerLimits()
        self._logs_content = logs_content

    async def run(
        self, backend: Backend, request: pb.GenerateRequest, sink: Sink, deadline: float | None = None
    ) -> None:
        """Write every message of the call. Raises EngineError; what was admitted is freed in any case.

        `deadline`: of time.monotonic(). Who calls is told by `current_caller`.
        """
        arrival = Arrival(time.monotonic(), deadline, current_caller.get())
        try:
            with ExitStack() as stack:
                if self._logs_content:
                    sink = logged = LoggedSink(request, sink)
                    stack.callback(logged.log)
                call, choices = await self._admit(backend, request, arrival, stack)
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
        self, backend: Backend, request: pb.GenerateRequest, arrival: Arrival, stack: ExitStack
    ) -> tuple[LiveCall, list[_RunningChoice]]:
        request_id, num_choices = read_identity(request)
        bind_contextvars(request_id=request_id)
        caller = arrival.caller
        check = partial(
            backend.admission.check,
            caller.tenant,
            request.priority,
            num_choices=num_choices,
            deadline=arrival.deadline,
        )
        check(num_tokens=0)  # what is refused anyway is not even tokenized
        stack.enter_context(self._limits.running(caller, num_choices))
        engine_ids = choice_ids(caller.scoped(request_id), num_choices)
        call = stack.enter_context(self._live.enter(request_id, engine_ids))
        plan = await backend.converter.plan(request, call.engine_ids, arrival.time, caller)
        num_tokens = len(plan.requests[0].prompt_token_ids)
        check(num_tokens=num_tokens)
        self._limits.charge_prompt(caller, num_tokens)
        streams = _submit(backend.client, plan)
        call.is_submitted = True
        stack.enter_context(backend.admission.waiting(plan.requests))
        charge = partial(self._limits.charge_output, caller)
        choices = [
            stack.enter_context(self._choice(backend, plan, i, stream, request_id, charge))
            for i, stream in enumerate(streams)
        ]
        if call.is_aborted:  # while its prompt was tokenized
            backend.client.abort(list(call.engine_ids))
        return call, choices

    @contextmanager
    def _choice(
        self,
        backend: Backend,
        plan: GenerationPlan,
        index: int,
        stream: RequestStream,
        request_id: str,
        charge: Callable[[int], None],
    ) -> Iterator[_RunningChoice]:
        request = plan.requests[index]
        renderer = (
            backend.text.renderer(request.prompt_token_ids, request.params) if plan.wants_text else None
        )
        messages = ChoiceStream(
            index,
            request,
            request_id=request_id,
            model_name=backend.client.model_info.model_name,
            renderer=renderer,
            token_text=backend.text.token_text,
            stream_interval=plan.stream_interval,
        )
        self._metrics.choice_started(request.request_id)
        unfinished: str | None = "cancelled"
        try:
            yield _RunningChoice(request, stream, messages, charge)
        except EngineError as error:
            unfinished = None if isinstance(error, REFUSALS) else "error"
            raise
        finally:
            stream.close()
            for observer in (self._metrics, self._tracing):
                observer.choice_ended(
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
            choice.charge(len(output.token_ids))
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

"""The engine's loop, the same in its own process and in a thread of the frontend.

Messages in, steps, messages out. It knows neither sockets nor threads nor what a core is made of. It is the
boundary at which every exception of the engine becomes a message, because whoever waits for the engine must
learn why it is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from engine.control import AnyAction, AnyResult
from engine.errors import EngineError
from engine.messages import (
    AbortRequests,
    AddRequest,
    Control,
    ControlAnswer,
    EngineFailed,
    FromEngine,
    LoadProgress,
    ModelInfo,
    RequestRefused,
    Shutdown,
    StepMessage,
)

log = logging.getLogger(__name__)

Command = AddRequest | AbortRequests | Control | Shutdown
Publish = Callable[[FromEngine], None]


class Core(Protocol):
    """What the loop drives: engine.core.EngineCore, or a scripted one in tests."""

    model_info: ModelInfo

    def handle(self, message: AddRequest | AbortRequests) -> StepMessage | None: ...

    def control(self, action: AnyAction, answer: Callable[[AnyResult | EngineError], None]) -> None: ...

    @property
    def has_work(self) -> bool: ...

    def step(self) -> StepMessage | None: ...

    def prepare(self) -> bool: ...

    def close(self) -> None: ...


CoreFactory = Callable[[Callable[[LoadProgress], None]], Core]


class Inbox(Protocol):
    """Where commands come from."""

    def poll(self, block: bool) -> list[Command]:
        """Everything that has come; with `block`, wait until something has."""


def run_engine(make_core: CoreFactory, inbox: Inbox, publish: Publish) -> bool:
    """Load, serve until Shutdown, close. False if the engine failed; the reason has been published then."""
    try:
        core = make_core(publish)
        publish(core.model_info)
        run_engine_loop(core, inbox, publish)
        core.close()
    except EngineError as error:
        publish(EngineFailed(type(error).__name__, str(error)))
        return False
    except Exception as error:
        log.exception("the engine failed")
        publish(EngineFailed("internal", f"{type(error).__name__}: {error}"))
        return False
    return True


def run_engine_loop(core: Core, inbox: Inbox, publish: Publish) -> None:
    """Until Shutdown, at which all live requests end as cancelled."""
    live: set[str] = set()

    def send(message: StepMessage | None) -> None:
        if message is not None:
            live.difference_update(
                output.request_id for output in message.outputs if output.finish is not None
            )
            publish(message)

    while True:
        for command in inbox.poll(block=not core.has_work and not core.prepare()):
            match command:
                case AddRequest():
                    try:
                        message = core.handle(command)
                    except EngineError as error:
                        publish(RequestRefused.from_error(command.request_id, error))
                        continue
                    live.add(command.request_id)
                    send(message)
                case AbortRequests():
                    send(core.handle(command))
                case Control():
                    _control(core, command, publish)
                case Shutdown():
                    send(core.handle(AbortRequests(sorted(live))))
                    return
        if core.has_work:
            send(core.step())


def _control(core: Core, command: Control, publish: Publish) -> None:
    """The answer may come in a later step. What the change says of the model is told to everybody, and first: whoever
    has the answer finds it done."""
    info = core.model_info

    def answer(result: AnyResult | EngineError) -> None:
        if core.model_info is not info:
            publish(core.model_info)
        _answer(command.control_id, publish, result)

    try:
        core.control(command.action, answer)
    except EngineError as error:
        answer(error)


def _answer(control_id: str, publish: Publish, result: AnyResult | EngineError) -> None:
    if isinstance(result, EngineError):
        publish(RequestRefused.from_error(control_id, result))
    else:
        publish(ControlAnswer(control_id, result))

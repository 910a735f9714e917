"""How the frontend sees an engine, whichever process it lives in. Imports neither core nor torch.

A `RequestStream` never makes the engine wait: outputs that nobody has read yet are merged into one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from engine.control import Action, Result
from engine.errors import EngineError
from engine.messages import AddRequest, LoadProgress, ModelInfo, RequestOutput
from engine.stats import EngineStats, StepStats


class RequestStream(ABC):
    """The outputs of one request, in order. One reader."""

    request_id: str

    @abstractmethod
    async def next(self) -> RequestOutput:
        """Wait for news, and return everything since the last call as one output (deltas joined).

        After an output with `finish` there is nothing more. Raises EngineUnavailableError when the engine
        died, SlowReaderError when nobody had read for longer than the slow-reader time.
        """

    @abstractmethod
    def close(self) -> None:
        """End the request if it still runs (idempotent, does not wait). Call it in `finally`."""


class EngineClient(ABC):
    """One engine. All methods belong to one event loop."""

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo:
        """Known once `start` has returned."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Ready to serve: started, and not failed since."""

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """The newest load figures; no round trip."""

    @abstractmethod
    async def start(self, on_progress: Callable[[LoadProgress], None] | None = None) -> None:
        """Start the engine and wait until it is ready. Raises the EngineError that kept it from starting."""

    @abstractmethod
    def submit(self, request: AddRequest) -> RequestStream:
        """Start a request. Raises EngineUnavailableError, QueueFullError, InvalidRequestError (id in use)."""

    @abstractmethod
    def abort(self, request_ids: list[str]) -> list[str]:
        """End these requests; their streams finish with reason `cancelled`. Returns those that were live."""

    @abstractmethod
    async def control(self, action: Action[Result]) -> Result:
        """Ask the engine to do something and wait until it is done. Raises EngineError for what is refused, and
        EngineUnavailableError when there is no engine, or no longer.
        """

    @abstractmethod
    def on_step(self, callback: Callable[[list[RequestOutput], StepStats | None], None]) -> None:
        """Call this with every step's outputs and figures, before streams merge them (metrics)."""

    @abstractmethod
    def wait_failed(self) -> Awaitable[EngineError]:
        """Resolve with the reason once a started engine dies; never when it is stopped by `stop`."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the engine; live streams end as cancelled. Idempotent."""

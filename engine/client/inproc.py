"""An engine in a thread of this process, for tests and tools. The only client that may import the core."""

from __future__ import annotations

import asyncio
import queue
import threading
from functools import partial

from engine.client.streaming import StreamingClient
from engine.config import EngineConfig
from engine.loop import Command, run_engine
from engine.main import CoreBuilder, build_core
from engine.messages import FromEngine, Shutdown


class InprocEngineClient(StreamingClient):
    """The core runs on a thread of its own; messages are handed over as they are, without encoding."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        core_factory: CoreBuilder | None = None,
        slow_reader_timeout: float = 60.0,
    ) -> None:
        """`slow_reader_timeout`: seconds."""
        super().__init__(config.scheduler.max_waiting, slow_reader_timeout)
        self._config = config
        self._build_core = core_factory or build_core
        self._inbox = _QueueInbox()
        self._thread: threading.Thread | None = None

    async def _launch(self) -> None:
        loop = asyncio.get_running_loop()

        def publish(message: FromEngine) -> None:
            loop.call_soon_threadsafe(self._receive, message)

        make_core = partial(self._build_core, self._config)
        self._thread = threading.Thread(
            target=run_engine, args=(make_core, self._inbox, publish), name="engine", daemon=True
        )
        self._thread.start()

    def _send(self, message: Command) -> None:
        self._inbox.put(message)

    async def _shut_down(self) -> None:
        """Waits for the step, or the loading, that is under way: a thread cannot be ended from outside."""
        if self._thread is not None:
            self._send(Shutdown())
            await asyncio.to_thread(self._thread.join)


class _QueueInbox:
    """Commands from the event loop to the engine's thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def poll(self, block: bool) -> list[Command]:
        commands = [self._queue.get()] if block else []
        while not self._queue.empty():  # there is one reader: what is there stays there
            commands.append(self._queue.get())
        return commands

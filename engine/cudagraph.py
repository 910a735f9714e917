"""CUDA graphs: which batch shapes are captured, when, and how a batch finds the graph that it can replay.

A graph replays launches with the pointers that it was captured with. So what it computes stands between static
buffers, and nothing that was read on the host at capture may differ at replay: a manager's descriptor holds all of it.
Managers say what runs; recording is a function that is passed in, so that buffers and padding are tested without a GPU.

Capturing takes as long as several steps. A few shapes are captured before the engine is ready; the others when nothing
else is to be done, and what the last step asked for also before the next one, at most one a second.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine.garbage import no_collection

logger = logging.getLogger(__name__)

Run = Callable[[], None]
Recorder = Callable[[Run], Run]  # what runs -> what replays it
SECONDS_BETWEEN_CAPTURES = 1.0  # while requests run: each one delays a step
MAX_GRAPH_CONTEXT = 16384  # tokens; what a kernel reserves for the parts of a split context grows with it
SIZES = (1, 2, 4, 8, *(size << shift for shift in range(10) for size in (16, 24)))  # up to 12,288


class CudaRecorder:
    """Captures on a side stream, all graphs into one memory pool: only one replay's outputs are alive at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and sizes workspaces, which a capture must not do
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay


class ShapeDescriptor(Protocol):
    """All that the host knows of a captured batch. Hashable; a larger one may stand in for a smaller one."""

    def covers(self, needed: Any) -> bool:
        """Can a batch of the needed shape run padded to this one?"""

    @property
    def cost(self) -> tuple[int, ...]:
        """Orders shapes by how long they run."""


D = TypeVar("D", bound=ShapeDescriptor)


class CudaGraphManager(ABC, Generic[D]):
    """Owns the graphs of one kind of forward pass."""

    def __init__(self, captures: CaptureQueue) -> None:
        self._captures = captures
        self._replays: dict[D, Callable[[], None]] = {}
        self._choices: dict[D, D | None] = {}  # needed -> the best that is captured

    @abstractmethod
    def run(self, descriptor: D) -> None:
        """The forward pass over the static buffers, at this shape; leaves its outputs where the caller finds them."""

    def prepare(self, descriptor: D) -> None:
        """Make the static buffers harmless to run on: a capture runs the pass once before it records it."""

    def capture(self, descriptor: D, recorder: Recorder) -> None:
        """Record this shape; no step of the device reads the static buffers meanwhile."""
        self.prepare(descriptor)
        self._replays[descriptor] = recorder(lambda: self.run(descriptor))
        self._choices.clear()

    def dispatch(self, needed: D) -> D | None:
        """The cheapest captured shape that covers the needed one; None: the batch has to run without a graph.

        A shape that is not captured itself is asked for.
        """
        if needed not in self._replays:
            self._captures.ask(self, needed)
        if needed not in self._choices:
            covering = [descriptor for descriptor in self._replays if descriptor.covers(needed)]
            self._choices[needed] = min(covering, key=lambda descriptor: descriptor.cost, default=None)
        return self._choices[needed]

    def replay(self, descriptor: D) -> None:
        """Run a captured shape on what the static buffers hold now."""
        self._replays[descriptor]()


class CaptureQueue:
    """What is still to be captured, of all managers. Not thread-safe."""

    def __init__(
        self,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
        compile_ahead: Callable[[Run], None] | None = None,
    ) -> None:
        """compile_ahead: compiles what runs, all at once; running compiles one after another."""
        self._recorder = recorder
        self._clock = clock
        self._compile_ahead = compile_ahead
        self._captured_at = float("-inf")
        self._asked_now: dict[tuple[int, Any], CudaGraphManager[Any]] = {}  # by the last step, in its order
        self._asked: dict[tuple[int, Any], CudaGraphManager[Any]] = {}  # what is captured next stands last
        self._planned: deque[tuple[CudaGraphManager[Any], Any]] = deque()
        self._known: set[tuple[int, Any]] = set()  # captured, or found impossible

    def plan(self, manager: CudaGraphManager[D], descriptors: Iterable[D]) -> None:
        """Capture these, in this order, when there is nothing else to do."""
        self._planned.extend((manager, descriptor) for descriptor in descriptors)

    def capture_first(self, count: int) -> None:
        """At the start: so many of the planned shapes. What was asked for before any request is nobody's wish."""
        self._asked_now.clear()
        shapes = [self._planned.popleft() for _ in range(min(count, len(self._planned)))]
        self._compile(shapes)
        for manager, descriptor in shapes:
            self._capture(manager, descriptor)

    def ask(self, manager: CudaGraphManager[D], descriptor: D) -> None:
        """A batch would have used this shape."""
        key = (id(manager), descriptor)
        if key not in self._known:
            self._asked_now[key] = manager

    def capture_asked(self) -> bool:
        """Between two steps: one shape that the last step asked for, if no other was captured just now. False: none.

        What steps before it asked for may not be needed any more: load that grows asks for many sizes on its way.
        """
        has_asked = self._end_step()
        if not has_asked or self._clock() - self._captured_at < SECONDS_BETWEEN_CAPTURES:
            return False
        self._capture(*self._pop_asked())
        return True

    def capture_next(self) -> bool:
        """While nothing runs: one shape. False: none is left."""
        self._end_step()
        while self._asked or self._planned:
            manager, descriptor = self._pop_asked() if self._asked else self._planned.popleft()
            if (id(manager), descriptor) not in self._known:
                self._compile([(manager, descriptor)])
                self._capture(manager, descriptor)
                return True
        return False

    def _end_step(self) -> bool:
        """What the last step asked for comes before all else, and of that what it asked for first: a graph of the whole
        step makes those of its parts needless. False: it asked for nothing.
        """
        has_asked = bool(self._asked_now)
        for key in reversed(self._asked_now):
            self._asked.pop(key, None)
            self._asked[key] = self._asked_now[key]
        self._asked_now.clear()
        return has_asked

    def _pop_asked(self) -> tuple[CudaGraphManager[Any], Any]:
        (_, descriptor), manager = self._asked.popitem()
        return manager, descriptor

    def _compile(self, shapes: Sequence[tuple[CudaGraphManager[Any], Any]]) -> None:
        """What they launch. Takes time even where nothing is to be compiled: only where no step waits."""

        def run() -> None:
            for manager, descriptor in shapes:
                manager.prepare(descriptor)
                manager.run(descriptor)

        if self._compile_ahead is None or not shapes:
            return
        with torch.inference_mode(), contextlib.suppress(torch.OutOfMemoryError):  # which the capture reports
            self._compile_ahead(run)

    def _capture(self, manager: CudaGraphManager[D], descriptor: D) -> None:
        self._known.add((id(manager), descriptor))
        try:
            with torch.inference_mode():
                manager.capture(descriptor, self._recorder)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory to capture %s; such batches run without a graph: %s", descriptor, error)
        self._captured_at = self._clock()


@dataclass(frozen=True, kw_only=True)
class BatchDescriptor:
    """The shape of a ragged batch. A smaller batch is padded: requests of length 0, tokens that store nothing."""

    num_tokens: int
    num_reqs: int
    max_query_len: int
    has_chunks: bool  # of prompts

    def covers(self, needed: BatchDescriptor) -> bool:
        return (
            self.has_chunks == needed.has_chunks  # attention shares its work out in other ways
            and self.num_tokens >= needed.num_tokens
            and self.num_reqs >= needed.num_reqs
            and self.max_query_len >= needed.max_query_len
        )

    @property
    def cost(self) -> tuple[int, ...]:
        return self.num_tokens, self.num_reqs


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The largest ragged batches that are captured."""

    num_reqs: int
    max_seq_len: int
    decode_query_len: int  # tokens of a request that decodes: the last one and its drafts
    chunk_tokens: int  # of a step with prompt chunks in it; 0: such steps launch

    @property
    def num_tokens(self) -> int:
        return max(self.num_reqs * self.decode_query_len, self.chunk_tokens)

    def describe(
        self, query_lens: Sequence[int], max_seq_lens: Sequence[int], has_chunks: bool
    ) -> BatchDescriptor | None:
        """The smallest shape that holds the batch; None: it is too large for a graph."""
        num_tokens = sum(query_lens)
        most = self.chunk_tokens if has_chunks else self.num_reqs * self.decode_query_len
        if num_tokens > most or max(max_seq_lens) > self.max_seq_len:
            return None
        size = smallest_size(num_tokens, most)
        return BatchDescriptor(
            num_tokens=size,
            num_reqs=min(size, self.num_reqs),
            max_query_len=size if has_chunks else self.decode_query_len,
            has_chunks=has_chunks,
        )


def smallest_size(count: int, limit: int) -> int:
    """The captured size for so many requests or tokens: one of SIZES, or `limit`, the most there may be."""
    return next((size for size in SIZES if count <= size < limit), limit)


def sizes_up_to(limit: int) -> list[int]:
    """Every `smallest_size`. Example: 20 -> 1, 2, 4, 8, 16, 20."""
    return [*(size for size in SIZES if size < limit), limit]

"""CUDA graphs: which batch shapes are captured, and how a batch finds the graph that it can replay.

A graph replays launches with the pointers that it was captured with. So what it computes stands between static
buffers, and nothing that was read on the host at capture may differ at replay: a manager's descriptor holds all of it.
Managers say what runs; recording is a function that is passed in, so that buffers and padding are tested without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Recorder = Callable[[Callable[[], None]], Callable[[], None]]  # what runs -> what replays it


@dataclass(frozen=True, order=True)
class BatchDescriptor:
    """The shape of a captured batch. A smaller batch is padded: requests of length 0, tokens that store nothing."""

    num_tokens: int
    num_reqs: int
    max_query_len: int

    def fits(self, num_tokens: int, num_reqs: int, max_query_len: int) -> bool:
        return (
            num_tokens <= self.num_tokens
            and num_reqs <= self.num_reqs
            and max_query_len <= self.max_query_len
        )


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
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay


class CudaGraphManager(ABC):
    """Owns the graphs of one kind of forward pass."""

    def __init__(self, descriptors: Iterable[BatchDescriptor], recorder: Recorder) -> None:
        self._descriptors = sorted(descriptors)
        self._recorder = recorder
        self._replays: dict[BatchDescriptor, Callable[[], None]] = {}

    @abstractmethod
    def run(self, descriptor: BatchDescriptor) -> None:
        """The forward pass over the static buffers, at this shape; leaves its outputs where `replay` finds them."""

    def capture(self) -> None:
        """Record all shapes, the smallest first."""
        for descriptor in self._descriptors:
            self._replays[descriptor] = self._recorder(lambda shape=descriptor: self.run(shape))  # type: ignore[misc]

    def dispatch(self, num_tokens: int, num_reqs: int, max_query_len: int) -> BatchDescriptor | None:
        """The smallest captured shape that holds the batch; None: it has to run without a graph."""
        for descriptor in self._descriptors:
            if descriptor.fits(num_tokens, num_reqs, max_query_len) and descriptor in self._replays:
                return descriptor
        return None

    def replay(self, descriptor: BatchDescriptor) -> None:
        """Run a captured shape on what the static buffers hold now."""
        self._replays[descriptor]()


def decode_descriptors(max_num_seqs: int, max_drafts: int) -> list[BatchDescriptor]:
    """Shapes of batches that only decode: 1, 2, 4, 8 and every further multiple of 8 up to 32, then powers of two with
    their halves between, with and without drafts.

    Example, 4 requests, no drafts: 1, 2 and 4 tokens.
    """
    shapes = []
    for query_len in {1, 1 + max_drafts}:
        limit = max_num_seqs * query_len
        sizes = [size for size in _SIZES if size < limit] + [limit]
        shapes += [BatchDescriptor(size, min(size, max_num_seqs), query_len) for size in sizes]
    return shapes


_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)

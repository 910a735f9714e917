"""Whole decode steps as CUDA graphs: gathered from the rows, computed, verified, written back, drafted.

Of a step in which all requests decode and one draft method at most drafts, the host decides nothing but which rows
take part, how many drafts of each are verified and how many it makes. So these numbers are all that is copied in, and
one tensor is copied out; steps can be launched back to back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch.input_batch import BatchLayout, lay_out_decode
from engine.cudagraph import MAX_GRAPH_CONTEXT, CaptureQueue, CudaGraphManager, sizes_up_to, smallest_size
from engine.device import fill
from engine.request import NO_METHOD
from engine.sampling.features import SAMPLING_KINDS, SamplingKind
from engine.sampling.states import SamplingStates
from engine.spec_decode.speculator import SpeculatorNeeds
from engine.step import ScheduledRequest, StepPlan

CONTEXTS = (512, 2048, 8192)  # tokens; a graph for shorter contexts splits them into fewer parts


@dataclass(frozen=True, kw_only=True)
class StepDescriptor:
    """`num_drafts`: verified of every request, and made for it, at most."""

    method: str  # who drafts for the next step
    num_reqs: int
    num_drafts: int
    sampling: SamplingKind
    max_seq_len: int

    def covers(self, needed: StepDescriptor) -> bool:
        return (
            self.method == needed.method
            and self.num_reqs >= needed.num_reqs
            and self.num_drafts >= needed.num_drafts
            and SAMPLING_KINDS.index(self.sampling) >= SAMPLING_KINDS.index(needed.sampling)
            and self.max_seq_len >= needed.max_seq_len
        )

    @property
    def cost(self) -> tuple[int, ...]:
        return self.num_reqs * (1 + self.num_drafts), SAMPLING_KINDS.index(self.sampling), self.max_seq_len


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The most that a step may hold."""

    num_reqs: int
    max_seq_len: int
    num_drafts: Mapping[str, int]  # by draft method, in the order in which their steps are captured
    verified_drafts: int  # of any method, also one on the host


class StepGraphs(CudaGraphManager[StepDescriptor]):
    """`run_step`: both parts of a step, to its packed results. Row `limits.num_reqs` is nobody's: it pads."""

    def __init__(
        self,
        run_step: Callable[[BatchLayout, StepDescriptor], torch.Tensor],
        *,
        limits: StepLimits,
        states: SamplingStates,
        needs: Mapping[str, SpeculatorNeeds],
        device: torch.device,
        captures: CaptureQueue,
    ) -> None:
        super().__init__(captures)
        self._run_step = run_step
        self._limits = limits
        self._states = states
        self._needs = needs
        self._max_seq_len = min(limits.max_seq_len, MAX_GRAPH_CONTEXT)
        most = _even(limits.num_reqs)
        self._padding = np.array([[limits.num_reqs], [0], [0]], dtype=np.int64).repeat(most, axis=1)
        self._inputs = torch.zeros(3 * most, dtype=torch.int64, device=device)
        self._layouts: dict[StepDescriptor, BatchLayout] = {}
        self._results: dict[StepDescriptor, torch.Tensor] = {}
        captures.plan(self, self._planned())

    def find(self, plan: StepPlan) -> StepDescriptor | None:
        """The graph that holds the step, if one may and does."""
        needed = self._describe(plan)
        return None if needed is None else self.dispatch(needed)

    def step(self, descriptor: StepDescriptor, scheduled: Sequence[ScheduledRequest]) -> torch.Tensor:
        """Replay for these requests. Returns their packed results, valid until the next step."""
        inputs, num_reqs = self._padding_of(descriptor), len(scheduled)
        inputs[0, :num_reqs] = [entry.row for entry in scheduled]
        if descriptor.num_drafts > 0:
            inputs[1, :num_reqs] = [entry.num_drafts for entry in scheduled]
            inputs[2, :num_reqs] = [
                entry.num_next_drafts if entry.method == descriptor.method else 0 for entry in scheduled
            ]
        fill(self._inputs_of(descriptor), inputs)
        self.replay(descriptor)
        return self._results[descriptor][: len(scheduled)]

    def prepare(self, descriptor: StepDescriptor) -> None:
        inputs = self._inputs_of(descriptor)
        fill(inputs, self._padding_of(descriptor))
        # Made here, because what is constant in it need not be computed again by every replay.
        rows, planned_drafts, wanted_drafts = inputs[:, : descriptor.num_reqs].unbind()
        self._layouts[descriptor] = lay_out_decode(
            rows,
            planned_drafts,
            wanted_drafts,
            max_drafts=descriptor.num_drafts,
            max_seq_len=descriptor.max_seq_len,
        )

    def run(self, descriptor: StepDescriptor) -> None:
        self._results[descriptor] = self._run_step(self._layouts[descriptor], descriptor)

    def _inputs_of(self, descriptor: StepDescriptor) -> torch.Tensor:
        """[3, num_reqs, made even] int64: rows, drafts to verify, drafts to make. Dense, so that one copy fills it;
        even, so that each is aligned to 16 bytes: kernels are compiled anew for other alignments."""
        width = _even(descriptor.num_reqs)
        return self._inputs[: 3 * width].view(3, width)

    def _padding_of(self, descriptor: StepDescriptor) -> np.ndarray:
        """Such inputs of nobody, to be changed."""
        return self._padding[:, : _even(descriptor.num_reqs)].copy()

    def _planned(self) -> list[StepDescriptor]:
        """Greedy steps of every size and method at full length; what else batches need, they ask for."""
        return [
            StepDescriptor(
                method=method,
                num_reqs=size,
                num_drafts=num_drafts,
                sampling="greedy",
                max_seq_len=self._max_seq_len,
            )
            for size in sizes_up_to(self._limits.num_reqs)
            for method, num_drafts in {NO_METHOD: 0, **self._limits.num_drafts}.items()
        ]

    def _describe(self, plan: StepPlan) -> StepDescriptor | None:
        """The shape that fits best; None for a step that is no uniform decode."""
        if plan.needs_host_inputs or plan.chunks:
            return None
        entries = plan.scheduled
        kind = self._states.common_kind([entry.row for entry in entries])
        method = self._common_method(entries)
        max_seq_len = max([entry.max_seq_len for entry in entries])
        if kind is None or method is None or max_seq_len > self._max_seq_len:
            return None
        num_verified = max([entry.num_drafts for entry in entries])
        num_wanted = max([entry.num_next_drafts for entry in entries if entry.method == method], default=0)
        num_drafts = max(num_verified, num_wanted)
        usual = self._limits.num_drafts.get(method, 0)
        most = usual if num_drafts <= usual else self._limits.verified_drafts  # another method's may be more
        return StepDescriptor(
            method=method,
            num_reqs=smallest_size(len(entries), self._limits.num_reqs),
            num_drafts=0 if num_drafts == 0 else smallest_size(num_drafts, most),
            sampling=kind,
            max_seq_len=self._context(max_seq_len),
        )

    def _context(self, max_seq_len: int) -> int:
        bounds = (bound for bound in CONTEXTS if max_seq_len <= bound < self._max_seq_len)
        return next(bounds, self._max_seq_len)

    def _common_method(self, entries: Sequence[ScheduledRequest]) -> str | None:
        """The one method of the device that runs in the step; "none": there is no such; None: several, or one with KV
        of its own that some requests do not use: their rows have no blocks for it; or one that has to catch up."""
        if not self._needs:
            return NO_METHOD
        if any(entry.draft_feed is not None for entry in entries):
            return None
        methods = {entry.keeps_up for entry in entries if entry.keeps_up in self._needs}
        for entry in entries:
            needs = self._needs.get(entry.method)
            if needs is not None and (entry.num_next_drafts > 0 or needs.draft_kv == "own"):
                methods.add(entry.method)
        if len(methods) > 1:
            return None
        if not methods:
            return NO_METHOD
        (method,) = methods
        if self._needs[method].draft_kv == "own" and any(
            method not in (entry.method, entry.keeps_up) for entry in entries
        ):
            return None
        return method


def _even(number: int) -> int:
    return number + number % 2

"""One step on the device: gather, forward, verify, update, propose.

The runner owns the rows and knows the order of the phases. It does not know what a model or a draft method is called,
why a request was scheduled, or where a run is cut. Part A ends with the logits; part B needs nothing from the host
unless the plan says so (`needs_host_inputs`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.attention.metadata import NeededTokens
from engine.batch.block_tables import BlockTables
from engine.batch.input_batch import BatchLayout, InputBatch, derive_batch, gather_batch
from engine.batch.request_rows import RequestRows
from engine.cudagraph import CaptureQueue
from engine.kernels.emit_runs import Verification, emit_runs
from engine.kernels.pack_results import pack_results
from engine.models.base import CausalLM
from engine.request import NO_METHOD
from engine.sampling.features import BatchFeatures, uniform_features
from engine.sampling.logprobs import LogprobsTensors, compute_logprobs
from engine.sampling.sampler import SampleBatch, sampled_logprobs
from engine.sampling.states import SamplingStates
from engine.sampling.token_masks import mask_tokens
from engine.sampling.verification_rule import VerificationRule
from engine.sampling.verified_drafts import VerifiedDrafts
from engine.spec_decode.speculator import ProposalInputs
from engine.spec_decode.speculator_set import CheckedDrafts, SpeculatorSet
from engine.step import HostInputs, NewRow, ScheduledRequest, StepPlan
from engine.worker.output import PendingOutput, StepTensors, make_copy_stream
from engine.worker.step_graphs import StepDescriptor, StepGraphs, StepLimits
from engine.worker.target import TargetForward, TargetStates

PROMPT_LOGPROBS_CHUNK = 256  # logits rows at a time, so that a long prompt needs no [tokens, vocab] buffer


@dataclass
class TargetPass:
    """Part A of a step: everything that part B needs."""

    plan: StepPlan
    batch: InputBatch
    states: TargetStates
    draft_methods: list[str]  # who made the drafts verified here, per request
    clock: PhaseClock


@dataclass(frozen=True)
class VerifiedStep:
    """What the rows hold by now."""

    runs: Verification
    num_rejected: torch.Tensor  # [num_reqs] int64; scheduled tokens whose KV is void
    token_ids: torch.Tensor  # [num_logits] int64; the token of each logits row


@dataclass
class PhaseClock:
    """Host time by phase of the step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def resume(self) -> None:
        """What passed since the last lap was not the step's."""
        self._last = time.perf_counter()


class ModelRunner:
    """Owns the device state of all running requests."""

    def __init__(
        self,
        *,
        model: CausalLM,
        target: TargetForward,
        block_tables: BlockTables,
        speculators: SpeculatorSet,
        rule: VerificationRule,
        num_rows: int,
        max_model_len: int,
        max_drafts: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._target = target
        self._speculators = speculators
        self._rows = RequestRows(num_rows, max_model_len, max_drafts, device)
        self._block_tables = block_tables
        self._states = SamplingStates(num_rows, model.vocab_size, device)
        self._rule = rule
        self._row_info: dict[int, NewRow] = {}
        self._draft_methods: dict[int, str] = {}  # row -> who made the drafts that stand in it
        self._copy_stream = make_copy_stream(device)
        self._copies_apart = False  # has the copy stream had work since the last replay?
        self._clock = PhaseClock()  # of the step that is being launched
        self._captures: CaptureQueue | None = None
        self._step_graphs: StepGraphs | None = None

    @torch.inference_mode()
    def launch_target(self, plan: StepPlan) -> TargetPass:
        """Part A: apply the plan's updates, gather, run the target, compute the logits that are needed."""
        clock = self._clock
        self._apply_updates(plan)
        batch = gather_batch(plan.scheduled, self._rows, self._block_tables)
        draft_methods = self._methods_of(batch.row_list)
        clock.lap("prepare")
        states = self._target.forward(batch, self._needed_tokens(batch))
        clock.lap("target")
        return TargetPass(plan, batch, states, draft_methods, clock)

    @torch.inference_mode()
    def launch_verify(self, target: TargetPass, inputs: HostInputs | None = None) -> PendingOutput:
        """Part B: sample and verify, update the rows, propose, send the results on their way."""
        batch, clock = target.batch, target.clock
        clock.resume()
        logits = target.states.logits
        if inputs is not None and inputs.token_bitmask is not None:
            logits = mask_tokens(logits, inputs.token_bitmask, inputs.masked_rows)
        features = self._states.features(batch.logits_row_list)
        verified = self._verify(batch, logits, features)
        logprobs = sampled_logprobs(target.states.logits, verified.token_ids, features)
        prompt_logprobs = self._prompt_logprobs(target)
        clock.lap("verify")
        drafts = self._propose(target, verified)
        clock.lap("draft")
        tensors = StepTensors(
            results=pack_results(verified.runs, batch.num_drafts, (drafts.num_draft_tokens, drafts.is_bad)),
            next_drafts=drafts.token_ids if target.plan.needs_host_inputs else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return self._pending(target, tensors, drafts.has_failed)

    @torch.inference_mode()
    def launch_captured(self, plan: StepPlan) -> PendingOutput | None:
        """The whole step as one replay, if it is a uniform decode and a graph holds it."""
        clock = self._clock = PhaseClock()
        if self._captures is not None and self._captures.capture_asked():
            clock.lap("capture")
        descriptor = self._step_graphs.find(plan) if self._step_graphs is not None else None
        if descriptor is None:
            return None
        assert self._step_graphs is not None
        self._apply_updates(plan)
        stream = self._replay_stream()
        clock.lap("prepare")
        results = self._step_graphs.step(descriptor, plan.scheduled)
        num_reqs = len(plan.scheduled)
        draft_methods = self._methods_of([entry.row for entry in plan.scheduled])
        self._remember_methods(plan.scheduled)
        pending = PendingOutput(
            plan.step,
            plan.scheduled,
            StepTensors(results=results),
            draft_methods=draft_methods,
            drafter_errors=[False] * num_reqs,
            num_logprobs=[None] * num_reqs,
            num_prompt_logprobs={},
            phase_seconds=clock.seconds,
            graph_kind="full",
            num_padding_tokens=descriptor.num_reqs * (1 + descriptor.num_drafts) - plan.num_scheduled_tokens,
            copy_stream=stream,  # the next replay writes to the same results
        )
        clock.lap("target")
        return pending

    def init_graphs(self, captures: CaptureQueue, target: TargetForward, limits: StepLimits) -> None:
        """Whole decode steps may be captured from now on, with this target, which must launch."""
        self._captures = captures
        self._step_graphs = StepGraphs(
            lambda layout, descriptor: self._run_step(layout, descriptor, target),
            limits=limits,
            states=self._states,
            needs=self._speculators.needs_by_method,
            device=self._rows.device,
            captures=captures,
        )

    def capture_first(self, count: int) -> None:
        """At the start: so many graphs of decode steps."""
        if self._captures is not None:
            self._captures.capture_first(count)

    def capture_next(self) -> bool:
        """While nothing runs: capture one more graph. False: all are there."""
        return self._captures is not None and self._captures.capture_next()

    def _replay_stream(self) -> torch.cuda.Stream | None:
        """The one that steps run on, when the copy stream has read all that a replay may write to."""
        if self._copy_stream is None:
            return None
        stream = torch.cuda.current_stream(self._copy_stream.device)
        if self._copies_apart:
            stream.wait_stream(self._copy_stream)
            self._copies_apart = False
        return stream

    def _run_step(
        self, layout: BatchLayout, descriptor: StepDescriptor, target: TargetForward
    ) -> torch.Tensor:
        """Both parts of a uniform decode step, launches only; the packed results."""
        batch = derive_batch(layout, self._rows, self._block_tables)
        states = target.forward(batch, None)
        num_reqs, kind, vocab_size = len(batch.rows), descriptor.sampling, self._model.vocab_size
        features = uniform_features(len(batch.logits_rows), kind, vocab_size)
        verified = self._verify(batch, states.logits, features)
        inputs = self._proposal_inputs(batch, states, verified)
        drafts = self._speculators.propose_uniformly(
            descriptor.method,
            replace(
                inputs,
                wanted=[descriptor.num_drafts] * num_reqs,
                fixed_features=uniform_features(num_reqs, kind, vocab_size),
                in_graph=True,
            ),
        )
        next_drafts = None if drafts is None else (drafts.num_draft_tokens, drafts.is_bad)
        return pack_results(verified.runs, batch.num_drafts, next_drafts)

    def _needed_tokens(self, batch: InputBatch) -> NeededTokens | None:
        """Those that logits are computed of, unless somebody wants the hidden states of all."""
        wants_all = self._speculators.needs.hidden == "all" or any(
            self._row_info[row].params.prompt_logprobs is not None for row in batch.row_list
        )
        if wants_all or len(batch.logits_row_list) == len(batch.input_ids):
            return None
        counts = [1 + entry.num_drafts if entry.samples else 0 for entry in batch.scheduled]
        return NeededTokens(counts=counts, tokens=batch.logits_indices)

    def _apply_updates(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._rows.set_row(new)
            self._states.set_row(new)
            self._row_info[new.row] = new
            self._draft_methods.pop(new.row, None)
        self._block_tables.apply(plan.block_table_updates)
        self._rows.set_drafts(plan.host_drafts)

    def _verify(self, batch: InputBatch, logits: torch.Tensor, features: BatchFeatures) -> VerifiedStep:
        """Emit the runs and append them to the rows. logits: [num_logits, vocab_size], the target's as far as the host
        allows tokens."""
        sample_batch = SampleBatch(
            rows=batch.logits_rows,
            positions=batch.logits_positions,
            request_rows=self._rows,
            states=self._states,
            features=features,
        )
        drafts = VerifiedDrafts(batch.draft_ids, batch.logits_steps)
        ruled = self._rule.apply(logits, sample_batch, drafts)
        runs, num_rejected = emit_runs(ruled.token_ids, ruled.is_accepted, ruled.is_bad, batch, self._rows)
        return VerifiedStep(runs, num_rejected, ruled.token_ids)

    def _propose(self, target: TargetPass, verified: VerifiedStep) -> CheckedDrafts:
        batch = target.batch
        drafts = self._speculators.propose(
            self._proposal_inputs(batch, target.states, verified),
            keeps_up=[entry.keeps_up for entry in batch.scheduled],
        )
        self._remember_methods(batch.scheduled)
        return drafts

    def _proposal_inputs(
        self, batch: InputBatch, states: TargetStates, verified: VerifiedStep
    ) -> ProposalInputs:
        return ProposalInputs(
            row_list=batch.row_list,
            methods=[entry.method for entry in batch.scheduled],
            wanted=[entry.num_next_drafts for entry in batch.scheduled],
            num_wanted=batch.num_wanted,
            rows=batch.rows,
            attention=batch.attention,
            request_rows=self._rows,
            states=self._states,
            hidden_states=states.hidden_states,
            aux_hidden_states=states.aux_hidden_states,
            num_sampled=verified.runs.num_emitted,
            num_rejected=verified.num_rejected,
            draft_feeds=[entry.draft_feed for entry in batch.scheduled],
            draft_distributions=self._rule.draft_distributions,
        )

    def _methods_of(self, rows: Sequence[int]) -> list[str]:
        """Who made the drafts that stand in them."""
        if not self._draft_methods:
            return [NO_METHOD] * len(rows)
        return [self._draft_methods.get(row, NO_METHOD) for row in rows]

    def _remember_methods(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Who made the drafts that stand in the rows now."""
        for entry in scheduled:
            if entry.num_next_drafts > 0:
                self._draft_methods[entry.row] = entry.method
            elif self._draft_methods:
                self._draft_methods.pop(entry.row, None)

    def _prompt_logprobs(self, target: TargetPass) -> dict[int, LogprobsTensors]:
        """By batch index, for prefill chunks whose request asks: rows predict the prompt tokens after them."""
        result = {}
        first_token = 0
        for index, entry in enumerate(target.batch.scheduled):
            info = self._row_info[entry.row]
            num_top = info.params.prompt_logprobs
            count = min(entry.num_tokens, info.num_prompt_tokens - 1 - entry.start)
            if num_top is not None and entry.is_prefill and count > 0:
                result[index] = self._logprobs_of_span(target, entry, first_token, count, num_top)
            first_token += entry.num_tokens
        return result

    def _logprobs_of_span(
        self, target: TargetPass, entry: ScheduledRequest, first_token: int, count: int, num_top: int
    ) -> LogprobsTensors:
        first_target = entry.start + 1
        targets = self._rows.token_history[entry.row, first_target : first_target + count].to(torch.int64)
        parts = []
        for begin in range(0, count, PROMPT_LOGPROBS_CHUNK):
            end = min(begin + PROMPT_LOGPROBS_CHUNK, count)
            logits = self._model.compute_logits(
                target.states.hidden_states[first_token + begin : first_token + end]
            )
            parts.append(compute_logprobs(logits, targets[begin:end], num_top))
        return LogprobsTensors.concatenate(parts)

    def _pending(self, target: TargetPass, tensors: StepTensors, drafter_errors: list[bool]) -> PendingOutput:
        self._copies_apart = True
        infos = [self._row_info[row] for row in target.batch.row_list]
        return PendingOutput(
            target.plan.step,
            target.batch.scheduled,
            tensors,
            draft_methods=target.draft_methods,
            drafter_errors=drafter_errors,
            num_logprobs=[info.params.logprobs for info in infos],
            num_prompt_logprobs={
                index: infos[index].params.prompt_logprobs or 0 for index in tensors.prompt_logprobs
            },
            phase_seconds=target.clock.seconds,
            graph_kind=target.states.kind,
            num_padding_tokens=target.states.num_padding_tokens,
            copy_stream=self._copy_stream,
        )

"""One step on the device: gather, forward, verify, update, propose.

The runner owns the rows and knows the order of the phases. It does not know what a model or a draft method is called,
why a request was scheduled, or where a run is cut. Part A ends with the logits; part B needs nothing from the host
unless the plan says so (`needs_host_inputs`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.attention.backend import AttentionBackend, AttentionContext
from engine.attention.metadata import LayerKVCache
from engine.batch.block_tables import BlockTables
from engine.batch.input_batch import InputBatch, gather_batch
from engine.batch.request_rows import RequestRows
from engine.kv_spec import KVGroupSpec
from engine.models.base import CausalLM
from engine.sampling.logprobs import LogprobsTensors, compute_logprobs
from engine.sampling.sampler import SampleBatch, sampled_logprobs
from engine.sampling.states import SamplingStates
from engine.sampling.verification_rule import VerificationRule
from engine.sampling.verifier import Verification, locate_drafts, verify
from engine.spec_decode.speculator import ProposalInputs
from engine.spec_decode.speculator_set import CheckedDrafts, SpeculatorSet
from engine.step import HostInputs, NewRow, ScheduledRequest, StepPlan
from engine.worker.output import PendingOutput, StepTensors, make_copy_stream

PROMPT_LOGPROBS_CHUNK = 256  # logits rows at a time, so that a long prompt needs no [tokens, vocab] buffer


@dataclass
class TargetPass:
    """Part A of a step: everything that part B needs."""

    plan: StepPlan
    batch: InputBatch
    hidden_states: torch.Tensor  # [num_tokens, hidden_size]
    aux_hidden_states: Mapping[int, torch.Tensor]  # target layer -> its input, [num_tokens, hidden_size]
    logits: torch.Tensor  # [num_logits, vocab_size]
    draft_methods: list[str]  # who made the drafts verified here, per request
    clock: PhaseClock


@dataclass
class PhaseClock:
    """Host time by phase of the step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class ModelRunner:
    """Owns the device state of all running requests. `groups` and `caches` are the target's."""

    def __init__(
        self,
        *,
        model: CausalLM,
        backend: AttentionBackend,
        groups: Sequence[KVGroupSpec],
        caches: Mapping[int, LayerKVCache],
        block_tables: BlockTables,
        speculators: SpeculatorSet,
        rule: VerificationRule,
        max_num_rows: int,
        max_model_len: int,
        max_drafts: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._backend = backend
        self._groups = groups
        self._caches = caches
        self._speculators = speculators
        self._rows = RequestRows(max_num_rows, max_model_len, max_drafts, device)
        self._block_tables = block_tables
        self._states = SamplingStates(max_num_rows, model.vocab_size, device)
        self._rule = rule
        self._row_info: dict[int, NewRow] = {}
        self._draft_methods: dict[int, str] = {}  # row -> who made the drafts that stand in it
        self._copy_stream = make_copy_stream(device)

    @torch.inference_mode()
    def launch_target(self, plan: StepPlan) -> TargetPass:
        """Part A: apply the plan's updates, gather, run the target, compute the logits that are needed."""
        clock = PhaseClock()
        self._apply_updates(plan)
        batch = gather_batch(plan.scheduled, self._rows, self._block_tables)
        draft_methods = [self._draft_methods.get(row, "none") for row in batch.row_list]
        attention = AttentionContext(
            self._backend, batch.attention, self._groups, self._caches, self._speculators.needs.aux_layers
        )
        clock.lap("prepare")
        hidden_states = self._model(batch.input_ids, batch.attention.positions, attention)
        logits = self._model.compute_logits(hidden_states[batch.logits_indices])
        clock.lap("target")
        return TargetPass(
            plan, batch, hidden_states, attention.aux_hidden_states, logits, draft_methods, clock
        )

    @torch.inference_mode()
    def launch_verify(self, target: TargetPass, inputs: HostInputs | None = None) -> PendingOutput:
        """Part B: sample and verify, update the rows, propose, send the results on their way."""
        batch, clock = target.batch, target.clock
        logits = target.logits
        if inputs is not None and inputs.token_bitmask is not None:
            logits = _mask_logits(logits, inputs.token_bitmask)
        verification, logprobs = self._verify(target, logits)
        self._update_rows(batch, verification)
        prompt_logprobs = self._prompt_logprobs(target)
        clock.lap("verify")
        drafts = self._propose(target, verification)
        clock.lap("draft")
        tensors = StepTensors(
            token_ids=verification.token_ids,
            num_emitted=verification.num_emitted,
            num_drafts=batch.num_drafts,
            num_accepted=verification.num_accepted,
            num_next_drafts=drafts.num_draft_tokens,
            is_bad=verification.is_bad,
            is_bad_draft=drafts.is_bad,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return self._pending(target, tensors, drafts.has_failed)

    def _apply_updates(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._rows.set_row(new)
            self._states.set_row(new)
            self._row_info[new.row] = new
            self._draft_methods[new.row] = "none"
        self._block_tables.apply(plan.block_table_updates)
        self._rows.set_drafts(plan.host_drafts)

    def _verify(
        self, target: TargetPass, logits: torch.Tensor
    ) -> tuple[Verification, LogprobsTensors | None]:
        """The emitted runs, and log probabilities for the logits rows whose request asks. logits: [num_logits,
        vocab_size], the target's as far as the host allows tokens."""
        batch = target.batch
        features = self._states.features(batch.logits_row_list)
        sample_batch = SampleBatch(
            rows=batch.logits_rows,
            positions=batch.logits_positions,
            request_rows=self._rows,
            states=self._states,
            features=features,
        )
        fed = batch.input_ids[batch.logits_indices]
        drafts = locate_drafts(fed, batch.logits_reqs, batch.logits_start, batch.num_drafts)
        ruled = self._rule.apply(logits, sample_batch, drafts)
        room = self._rows.token_limit[batch.rows] - self._rows.num_tokens[batch.rows]
        verification = verify(
            token_ids=ruled.token_ids,
            is_bad=ruled.is_bad,
            is_accepted=ruled.is_accepted,
            logits_start=batch.logits_start,
            max_emitted=room.clamp(min=0),
            max_drafts=batch.max_drafts,
        )
        return verification, sampled_logprobs(target.logits, ruled.token_ids, features)

    def _update_rows(self, batch: InputBatch, verification: Verification) -> None:
        """Append the run, advance the counts. A prefill chunk computes all its tokens, a verification only the last
        sampled token and the accepted drafts: as many as it emits."""
        rows = self._rows
        num_tokens = rows.num_tokens[batch.rows].to(torch.int64)
        rows.write_tokens(batch.rows, num_tokens, verification.token_ids, verification.num_emitted)
        rows.num_tokens[batch.rows] = (num_tokens + verification.num_emitted).to(torch.int32)
        computed = batch.starts + torch.where(batch.is_prefill, batch.query_lens, verification.num_emitted)
        rows.num_computed_tokens[batch.rows] = computed.to(torch.int32)

    def _propose(self, target: TargetPass, verification: Verification) -> CheckedDrafts:
        batch = target.batch
        num_emitted = verification.num_emitted
        rejected = torch.where(batch.is_prefill, 0, batch.query_lens - num_emitted)
        drafts = self._speculators.propose(
            ProposalInputs(
                row_list=batch.row_list,
                methods=[entry.method for entry in batch.scheduled],
                wanted=[entry.num_next_drafts for entry in batch.scheduled],
                rows=batch.rows,
                attention=batch.attention,
                request_rows=self._rows,
                states=self._states,
                hidden_states=target.hidden_states,
                aux_hidden_states=target.aux_hidden_states,
                num_sampled=num_emitted,
                num_rejected=rejected,
                draft_distributions=self._rule.draft_distributions,
            ),
            keeps_up=[entry.keeps_up for entry in batch.scheduled],
        )
        for entry in batch.scheduled:
            self._draft_methods[entry.row] = entry.method if entry.num_next_drafts else "none"
        return drafts

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
            logits = self._model.compute_logits(target.hidden_states[first_token + begin : first_token + end])
            parts.append(compute_logprobs(logits, targets[begin:end], num_top))
        return LogprobsTensors.concatenate(parts)

    def _pending(self, target: TargetPass, tensors: StepTensors, drafter_errors: list[bool]) -> PendingOutput:
        infos = [self._row_info[row] for row in target.batch.row_list]
        return PendingOutput(
            target.plan.step,
            target.batch,
            tensors,
            draft_methods=target.draft_methods,
            drafter_errors=drafter_errors,
            num_logprobs=[info.params.logprobs for info in infos],
            num_prompt_logprobs={
                index: infos[index].params.prompt_logprobs or 0 for index in tensors.prompt_logprobs
            },
            phase_seconds=target.clock.seconds,
            copy_stream=self._copy_stream,
        )


def _mask_logits(logits: torch.Tensor, bitmask: bytes) -> torch.Tensor:
    """Keep the tokens whose bit is set. bitmask: [num_logits, ceil(vocab / 32)] little-endian int32."""
    num_logits, vocab_size = logits.shape
    words = torch.frombuffer(bytearray(bitmask), dtype=torch.int32).view(num_logits, -1)
    words = words.to(logits.device, non_blocking=True)
    token_ids = torch.arange(vocab_size, device=logits.device)
    bits = (words[:, token_ids // 32] >> (token_ids % 32)) & 1
    return logits.masked_fill(bits == 0, float("-inf"))

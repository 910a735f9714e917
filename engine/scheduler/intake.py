"""Takes in what a step brought: counts, tokens, valid KV and outputs of each request in it.

It knows neither when a step is launched nor what the end of a request means to others: who has to end, it says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import RequestOutput
from engine.request import FINISHED, NO_METHOD, RUNNING, WAITING, Request
from engine.scheduler import results
from engine.scheduler.draft_feeds import note_feed
from engine.scheduler.draft_policy import DraftPolicy
from engine.scheduler.grammars import Grammars
from engine.scheduler.host_drafts import HostDrafts
from engine.scheduler.running_set import RunningSet
from engine.scheduler.waiting_queue import WaitingQueue
from engine.step import RowResult, ScheduledRequest, StepOutput, StepPlan


@dataclass(slots=True)
class LaunchedStep:
    plan: StepPlan
    requests: list[Request]  # in plan order
    no_drafts_reasons: list[str]
    num_preempted: int  # to make room for it


@dataclass(slots=True)
class Intake:
    """Of one step."""

    outputs: list[RequestOutput] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)  # ended too; what they computed may be wrong
    not_drafted: list[str] = field(default_factory=list)  # reasons of decodes that had no draft to verify


class ResultIntake:
    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSet,
        draft_policy: DraftPolicy,
        host_drafts: HostDrafts,
        grammars: Grammars,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._kv = running.kv
        self._draft_policy = draft_policy
        self._host_drafts = host_drafts
        self._grammars = grammars

    def take(self, step: LaunchedStep, output: StepOutput, now: float) -> Intake:
        """The results of the oldest step in flight. Those of requests that have ended are dropped."""
        intake = Intake()
        for request, entry, result, reason in zip(
            step.requests, step.plan.scheduled, output.rows, step.no_drafts_reasons, strict=True
        ):
            request.num_in_flight_tokens -= entry.num_tokens
            request.num_in_flight_samples -= entry.samples
            if request.status is FINISHED:
                continue
            if request.message.constraint is not None:
                self._grammars.note(request, result)
            if entry.start < 0:  # a decode
                if result.draft_method != NO_METHOD:
                    self._draft_policy.observe_result(request, result)
                if result.num_drafted == 0:
                    intake.not_drafted.append(reason or results.why_nothing_came(request))
            if request.draft_method is not None:
                results.note_drafts(request, entry, result, on_host=self._host_drafts.makes(entry.method))
            if result.nan_target or result.failure:
                error = self._grammars.error_of(request)
                intake.outputs.append(results.error_output(request, result, error))
                intake.failed.append(request)
                continue
            request_output = self._take_result(request, entry, result, now)
            if request_output is not None:
                intake.outputs.append(request_output)
                if request_output.finish is not None:
                    intake.ended.append(request)
        return intake

    def _take_result(
        self, request: Request, entry: ScheduledRequest, result: RowResult, now: float
    ) -> RequestOutput | None:
        # A request that was preempted since has lost its KV; its tokens count all the same.
        is_running = request.status is RUNNING
        start = request.num_computed_tokens
        output: RequestOutput | None
        if is_running:
            request.num_computed_tokens += len(result.token_ids) if entry.start < 0 else entry.num_tokens
        if entry.samples:
            assert result.token_ids, f"{request.request_id}: a step that samples brought no token"
            cut = request.cutter.cut(result.token_ids)
            kept = result.token_ids if cut.finish is None else result.token_ids[: cut.num_kept]
            if request.status is WAITING:
                self._waiting.append_tokens(request, kept)
            else:
                request.token_ids += kept
            output = results.run_output(request, entry, result, cut, kept, now)
        else:
            output = results.chunk_output(request, result)
        if is_running:
            # Of the last confirmed token no KV is needed, and behind a cut none is confirmed.
            num_confirmed = min(request.num_computed_tokens, len(request.token_ids) - 1)
            if request.draft_method is not None:
                note_feed(request, entry, result, start, num_confirmed)
            if num_confirmed >= request.next_commit:
                self._kv.commit(request, num_confirmed, self._running.newest_step)
        return output

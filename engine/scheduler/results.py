"""From what a step brought for one request to what its client gets. No scheduling, no blocks.

All counts derive from the cut run: what the verifier accepted beyond the cut is known to no counter but
`SpecObservation.num_verifier_accepted`.
"""

from __future__ import annotations

from engine.errors import EngineError, InvalidRequestError
from engine.messages import FinishInfo, RequestOutput, RequestTimes
from engine.request import RUNNING, CutRun, Request
from engine.scheduler import not_drafted
from engine.stats import SpecObservation
from engine.step import RowResult, ScheduledRequest

NAN_MESSAGE = "the model's logits held NaN, or no token was left to sample; the request cannot go on"


def make_output(
    request: Request, finish: FinishInfo | None = None, token_ids: list[int] | None = None
) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        token_ids=token_ids or [],
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        finish=finish,
        num_preemptions=request.num_preemptions,
        times=request.times,
    )


def error_output(request: Request, result: RowResult, grammar_error: str) -> RequestOutput:
    """The step failed, the target's logits were unusable, or there was no token that its grammar could go on with."""
    message = result.failure or NAN_MESSAGE
    if grammar_error and not result.failure:
        message = f"its grammar cannot go on: {grammar_error}"
    return make_output(request, FinishInfo(reason="error", message=message))


def refused_output(request: Request, error: EngineError) -> RequestOutput:
    """Its grammar could not be compiled."""
    if isinstance(error, InvalidRequestError):
        finish = FinishInfo(reason="error", field=error.field, message=error.description)
    else:
        finish = FinishInfo(reason="error", message=str(error))
    return make_output(request, finish)


def cancelled_output(request: Request) -> RequestOutput:
    return make_output(request, FinishInfo(reason="cancelled"))


def chunk_output(request: Request, result: RowResult) -> RequestOutput | None:
    """A chunk that samples nothing. The first one tells the client that its prompt is being computed, unless
    prompt log probabilities have to come with that: then the last chunk does.
    """
    keep_prompt_logprobs(request, result)
    if request.is_announced or request.wants_prompt_logprobs:
        return None
    request.is_announced = True
    return make_output(request)


def keep_prompt_logprobs(request: Request, result: RowResult) -> None:
    """Collect those of a chunk; the first prompt token has none."""
    if result.prompt_logprobs and not request.is_announced:
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        request.prompt_logprobs += result.prompt_logprobs


def run_output(
    request: Request, entry: ScheduledRequest, result: RowResult, cut: CutRun, kept: list[int], now: float
) -> RequestOutput:
    """A run of sampled tokens, of which the cut has `kept` these. `now`: time.monotonic()."""
    times = request.times
    request.times = RequestTimes(
        arrival=times.arrival,
        first_scheduled=times.first_scheduled,
        first_token=times.first_token or now,
        last_token=now,
    )
    output = make_output(request, cut.finish, kept)
    if result.logprobs is not None:
        output.logprobs = result.logprobs[: cut.num_kept]
    if result.num_drafted > 0:
        output.spec = [_observe(result, cut)]
    if not request.is_announced:
        _announce(request, entry, result, output)
    return output


def _announce(request: Request, entry: ScheduledRequest, result: RowResult, output: RequestOutput) -> None:
    """The first output of a request that was not announced by a chunk."""
    if request.wants_prompt_logprobs:
        if entry.is_prefill:
            keep_prompt_logprobs(request, result)
        output.prompt_logprobs = request.prompt_logprobs or [None]
        request.prompt_logprobs = []
    request.is_announced = True


def note_drafts(request: Request, entry: ScheduledRequest, result: RowResult, *, on_host: bool) -> None:
    """What the step left in the row for the next one. `on_host`: the drafts are not made by the step."""
    if request.status is not RUNNING:
        return
    if not entry.samples or on_host:
        request.num_known_drafts = None
        return
    request.num_known_drafts = result.num_next_drafts if entry.num_next_drafts else None
    request.has_drafter_failed = result.drafter_error or result.nan_draft


def why_nothing_came(request: Request) -> str:
    """Drafts were asked for, and the step had none to verify."""
    return not_drafted.DRAFTER_ERROR if request.has_drafter_failed else not_drafted.NO_MATCH


def _observe(result: RowResult, cut: CutRun) -> SpecObservation:
    """A run is its accepted drafts and one token of the target's own, as far as there is room for them;
    SpecObservation has an example."""
    num_accepted = min(cut.num_kept, result.num_accepted)
    is_over_limit = cut.finish is not None and cut.finish.reason == "length"
    return SpecObservation(
        method=result.draft_method,
        num_drafted=result.num_drafted,
        num_verifier_accepted=result.num_accepted,
        num_accepted=num_accepted,
        num_emitted=cut.num_kept,
        num_discarded_over_limit=result.num_accepted - num_accepted if is_over_limit else 0,
        num_discarded_by_grammar=result.num_ruled_out,
    )

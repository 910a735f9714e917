"""From the engine's outputs of one choice to its protocol messages: started, deltas, finished.

Synchronous and free of I/O: it decides what is sent and when a delta is due; the service sends it.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import InvalidRequestError, RequestFailedError
from engine.messages import (
    AddRequest,
    FinishInfo,
    PositionLogprobs,
    RequestOutput,
    RequestTimes,
    TokenLogprob,
)
from engine.stats import SpecObservation
from engine.text.renderer import TextRenderer
from server.pb.slipstream.v1 import generation_pb2 as pb

TokenText = Callable[[int], str]

_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


class SpeculationTotals:
    """Sums the verifications of one request."""

    def __init__(self) -> None:
        self.num_verifications = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_emitted_tokens = 0
        self._methods: set[str] = set()
        self._accepted_per_position: list[int] = []
        self._offered_per_position: list[int] = []

    def add(self, observation: SpecObservation) -> None:
        self._methods.add(observation.method)
        self.num_verifications += 1
        self.num_draft_tokens += observation.num_drafted
        self.num_accepted_tokens += observation.num_accepted
        self.num_emitted_tokens += observation.num_emitted
        missing = observation.num_drafted - len(self._offered_per_position)
        if missing > 0:
            self._offered_per_position += [0] * missing
            self._accepted_per_position += [0] * missing
        for position in range(observation.num_drafted):
            self._offered_per_position[position] += 1
        for position in range(observation.num_accepted):
            self._accepted_per_position[position] += 1

    @property
    def method(self) -> str:
        """`none`, the one method that was used, or `mixed`."""
        if len(self._methods) > 1:
            return "mixed"
        return next(iter(self._methods), "none")

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verification that had drafts; 0 without any."""
        return self.num_emitted_tokens / self.num_verifications if self.num_verifications else 0.0

    def to_proto(self) -> pb.SpeculationStats:
        return pb.SpeculationStats(
            method=self.method,
            verifications=self.num_verifications,
            draft_tokens=self.num_draft_tokens,
            accepted_tokens=self.num_accepted_tokens,
            acceptance_length=self.acceptance_length,
            accepted_per_position=self._accepted_per_position,
            offered_per_position=self._offered_per_position,
        )


class ChoiceStream:
    """Feed it every output in order; it returns the messages that are due."""

    def __init__(
        self,
        index: int,
        request: AddRequest,
        *,
        request_id: str,  # as the client knows it; choices have ids of their own in the engine
        model_name: str,
        renderer: TextRenderer | None,  # None: ids only
        token_text: TokenText,
        stream_interval: int,
    ) -> None:
        self.index = index
        self.num_tokens = 0  # emitted so far
        self.num_deltas = 0  # made so far
        self.speculation = SpeculationTotals()
        self.finish: FinishInfo | None = None
        self.times = RequestTimes(arrival=request.arrival_time)
        self._request = request
        self._request_id = request_id
        self._model_name = model_name
        self._renderer = renderer
        self._token_text = token_text
        self._stream_interval = stream_interval
        self._is_started = False
        self._pending_ids: list[int] = []
        self._pending_text = ""
        self._pending_logprobs: list[PositionLogprobs] = []

    def add(self, output: RequestOutput) -> list[pb.GenerateResponse]:
        """Raises RequestFailedError when the engine gave the request up, InvalidRequestError when it refused it."""
        if output.finish is not None and output.finish.field:
            raise InvalidRequestError(output.finish.field, output.finish.message)
        self.finish, self.times = output.finish, output.times
        if output.finish is not None and output.finish.reason == "error":
            raise RequestFailedError(output.finish.message or "the engine could not go on with this request")
        messages = []
        if not self._is_started:
            self._is_started = True
            messages.append(self._started(output))
        self._take(output)
        if self._is_delta_due(is_last=output.finish is not None):
            messages.append(self._delta())
        if output.finish is not None:
            messages.append(self._finished(output, output.finish))
        return messages

    def _take(self, output: RequestOutput) -> None:
        self.num_tokens += len(output.token_ids)
        self._pending_ids += output.token_ids
        if output.logprobs is not None:
            self._pending_logprobs += output.logprobs
        if self._renderer is not None and (output.token_ids or output.finish is not None):
            self._pending_text += self._renderer.feed(output.token_ids, output.finish)
        for observation in output.spec:
            self.speculation.add(observation)

    def _is_delta_due(self, *, is_last: bool) -> bool:
        if not self._pending_ids:
            return bool(self._pending_text)  # what was held back, at the end
        return is_last or self.num_deltas == 0 or len(self._pending_ids) >= self._stream_interval

    def _started(self, output: RequestOutput) -> pb.GenerateResponse:
        started = pb.Started(
            request_id=self._request_id,
            model=self._model_name,
            prompt_tokens=len(self._request.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
            prompt_logprobs=[self._position(position) for position in output.prompt_logprobs or ()],
        )
        return pb.GenerateResponse(index=self.index, started=started)

    def _delta(self) -> pb.GenerateResponse:
        delta = pb.Delta(text=self._pending_text, token_ids=self._pending_ids)
        if self._pending_logprobs:
            delta.logprobs.extend([self._position(position) for position in self._pending_logprobs])
            self._pending_logprobs = []
        self._pending_text = ""
        self._pending_ids = []
        self.num_deltas += 1
        return pb.GenerateResponse(index=self.index, delta=delta)

    def _finished(self, output: RequestOutput, finish: FinishInfo) -> pb.GenerateResponse:
        num_prompt_tokens = len(self._request.prompt_token_ids)
        finished = pb.Finished(
            reason=_FINISH_REASONS[finish.reason],
            eos_token_id=finish.eos_token_id,
            stop_token_id=finish.stop_token_id,
            stop_string=finish.stop_string,
            constraint_met=finish.is_constraint_met or None,
            usage=pb.Usage(
                prompt_tokens=num_prompt_tokens,
                cached_tokens=output.num_cached_tokens,
                completion_tokens=self.num_tokens,
                total_tokens=num_prompt_tokens + self.num_tokens,
            ),
            timing=timing(output.times, output.num_preemptions),
            speculation=self.speculation.to_proto(),
            seed=self._request.params.seed,
        )
        return pb.GenerateResponse(index=self.index, finished=finished)

    def _position(self, position: PositionLogprobs | None) -> pb.PositionLogprobs:
        """The first prompt token has none: an empty entry keeps the place."""
        if position is None:
            return pb.PositionLogprobs()
        return pb.PositionLogprobs(
            token=self._token_logprob(position.token),
            top=[self._token_logprob(entry) for entry in position.top],
        )

    def _token_logprob(self, entry: TokenLogprob) -> pb.TokenLogprob:
        return pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            text=self._token_text(entry.token_id),
        )


def timing(times: RequestTimes, num_preemptions: int) -> pb.Timing:
    """Durations between the stamps; 0 where one of the two is missing."""
    return pb.Timing(
        queue=_between(times.arrival, times.first_scheduled),
        prefill=_between(times.first_scheduled, times.first_token),
        time_to_first_token=_between(times.arrival, times.first_token),
        decode=_between(times.first_token, times.last_token),
        total=_between(times.arrival, times.last_token),
        preemptions=num_preemptions,
    )


def _between(start: float, end: float) -> float:
    return end - start if start and end else 0.0

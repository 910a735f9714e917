"""From our messages to those of the vLLM engine protocol, as a stream or as one answer per choice.

Counts in chunks are of the chunk; those of `complete` are of the whole choice. Token ids only: gateways make the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from server.pb.slipstream.v1 import generation_pb2 as pb

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "abort",
}


@dataclass
class _Choice:
    """What is known of one and not sent yet."""

    started: pb.Started
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.PositionLogprobs] = field(default_factory=list)

    def take(self) -> tuple[list[int], vllm.OutputLogProbs | None]:
        taken = self.token_ids, _output_logprobs(self.logprobs)
        self.token_ids, self.logprobs = [], []
        return taken


class GatewaySink:
    """The sink of one call. Streamed: a chunk for each delta, and a `complete` without ids for each choice. Else
    nothing but one `complete` for each choice.
    """

    def __init__(self, context: Any, request: vllm.GenerateRequest) -> None:
        self._context = context
        self._prompt = request.tokenized.input_ids
        self._is_streamed = request.stream
        self._choices: dict[int, _Choice] = {}

    async def open(self) -> None:
        # Headers that travel with a message that gets stuck would bar the way of a later status.
        await self._context.send_initial_metadata(())

    async def write(self, message: pb.GenerateResponse) -> None:
        index = message.index
        match message.WhichOneof("event"):
            case "started":
                self._choices[index] = _Choice(message.started)
            case "delta":
                choice = self._choices[index]
                choice.token_ids += message.delta.token_ids
                choice.logprobs += message.delta.logprobs
                if self._is_streamed and choice.token_ids:
                    await self._context.write(vllm.GenerateResponse(chunk=self._chunk(index, choice)))
            case "finished":
                complete = self._complete(index, self._choices.pop(index), message.finished)
                await self._context.write(vllm.GenerateResponse(complete=complete))

    def _chunk(self, index: int, choice: _Choice) -> vllm.GenerateStreamChunk:
        prompt_logprobs = self._prompt_logprobs(choice)
        token_ids, logprobs = choice.take()
        return vllm.GenerateStreamChunk(
            index=index,
            token_ids=token_ids,
            prompt_tokens=choice.started.prompt_tokens,
            completion_tokens=len(token_ids),
            cached_tokens=choice.started.cached_tokens,
            output_logprobs=logprobs,
            input_logprobs=prompt_logprobs,
        )

    def _complete(self, index: int, choice: _Choice, finished: pb.Finished) -> vllm.GenerateComplete:
        usage, speculation = finished.usage, finished.speculation
        prompt_logprobs = self._prompt_logprobs(choice)
        token_ids, logprobs = choice.take()
        complete = vllm.GenerateComplete(
            index=index,
            output_ids=token_ids,
            finish_reason=_FINISH_REASONS[finished.reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            output_logprobs=logprobs,
            input_logprobs=prompt_logprobs,
            spec_accepted_tokens=speculation.accepted_tokens,
            spec_draft_tokens=speculation.draft_tokens,
        )
        match finished.WhichOneof("cause"):  # the model's own end token is not one that the request asked for
            case "stop_token_id":
                complete.matched_token_id = finished.stop_token_id
            case "stop_string":
                complete.matched_stop_str = finished.stop_string
        return complete

    def _prompt_logprobs(self, choice: _Choice) -> vllm.InputLogProbs | None:
        """Once for each choice."""
        positions = list(choice.started.prompt_logprobs)
        choice.started.ClearField("prompt_logprobs")
        if not positions:
            return None
        return vllm.InputLogProbs(
            token_logprobs=[_optional_logprob(position) for position in positions],
            token_ids=self._prompt,
            top_logprobs=_top_logprobs(positions),
        )


def _output_logprobs(positions: Sequence[pb.PositionLogprobs]) -> vllm.OutputLogProbs | None:
    """None where none were asked for."""
    if not positions:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[position.token.logprob for position in positions],
        token_ids=[position.token.token_id for position in positions],
        top_logprobs=_top_logprobs(positions),
    )


def _optional_logprob(position: pb.PositionLogprobs) -> vllm.InputTokenLogProb:
    """The first token of a prompt has none."""
    return vllm.InputTokenLogProb(value=position.token.logprob if position.HasField("token") else None)


def _top_logprobs(positions: Sequence[pb.PositionLogprobs]) -> list[vllm.TopLogProbs]:
    """One entry a position, or none at all where only the tokens' own logprobs were asked for."""
    if not any(position.top for position in positions):
        return []
    return [
        vllm.TopLogProbs(
            values=[entry.logprob for entry in position.top],
            token_ids=[entry.token_id for entry in position.top],
        )
        for position in positions
    ]

"""Sends one request, does to it what the plan says, and notes what came of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.chaos.plan import Attempt

GIVE_UP = 120.0  # seconds; a call that has not ended by then never would
SLOW_LOGPROBS = 20  # of every token: more than a connection takes unread


@dataclass
class Outcome:
    """How a call ended; times are of time.monotonic()."""

    attempt: Attempt
    began: float
    ended: float = 0.0
    status: str = "OK"
    reason: str = ""  # of google.rpc.ErrorInfo
    has_given_up: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by choice
    texts: dict[int, str] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)  # choice -> reason

    def take(self, message: pb.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "started":
                self.tokens[message.index], self.texts[message.index] = [], ""
            case "delta":
                self.tokens[message.index] += message.delta.token_ids
                self.texts[message.index] += message.delta.text
            case "finished":
                self.finished[message.index] = message.finished.reason


async def send(
    stub: pb_grpc.GenerationServiceStub, question: pb.GenerateRequest, attempt: Attempt, request_id: str
) -> Outcome:
    """Returns when the call has ended, whatever its status."""
    request = pb.GenerateRequest()
    request.CopyFrom(question)
    request.request_id = request_id
    if attempt.disturbance == "slow":
        request.output.logprobs = SLOW_LOGPROBS
    outcome = Outcome(attempt, began=time.monotonic())
    call = stub.Generate(request, timeout=attempt.deadline)
    try:
        async with asyncio.timeout(GIVE_UP):
            await _read(stub, call, outcome, request_id)
    except TimeoutError:
        outcome.has_given_up = True
        call.cancel()
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        outcome.status = "CANCELLED"
    except grpc.aio.AioRpcError as error:
        outcome.status, outcome.reason = error.code().name, _reason(error)
    outcome.ended = time.monotonic()
    return outcome


async def _read(stub: pb_grpc.GenerationServiceStub, call: Any, outcome: Outcome, request_id: str) -> None:
    attempt = outcome.attempt
    num_messages = 0
    while True:
        if attempt.disturbance in ("cancel", "abort") and num_messages == attempt.after_messages:
            if attempt.disturbance == "cancel":
                call.cancel()
            else:
                await stub.Abort(pb.AbortRequest(request_ids=[request_id]))
        if attempt.pause and num_messages == 1:
            await asyncio.sleep(attempt.pause)
        message = await call.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            return
        num_messages += 1
        outcome.take(message)


def _reason(error: grpc.aio.AioRpcError) -> str:
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b"")).details:
        if detail.Unpack(info):
            return str(info.reason)
    return ""

"""The RPCs of slipstream.v1.GenerationService: each checks its request and asks who knows the answer.

Whether new generations are accepted is told in server/serving.py, how they run in server/generation.py, what they mean
in server/convert.py.
"""

# ruff: noqa: N802 - methods have the names of the RPCs

from __future__ import annotations

import time
from typing import Any

import grpc

from engine.errors import InvalidRequestError
from engine.params import validate_token_ids
from server.fields import check_fields
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from server.serving import Serving
from server.version import slipstream_version

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(pb_grpc.GenerationServiceServicer):
    """Our own protocol."""

    def __init__(self, serving: Serving, *, max_message_bytes: int) -> None:
        self._serving = serving
        self._max_message_bytes = max_message_bytes
        self._started_at = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        await self._serving.run(request, _Streamed(context), deadline_of(context))

    async def GenerateOnce(
        self, request: pb.GenerateOnceRequest, context: Context
    ) -> pb.GenerateOnceResponse:
        check_fields(request)
        collected = _Collected()
        try:
            await self._serving.run(request.request, collected, deadline_of(context))
        except InvalidRequestError as error:
            error.field = f"request.{error.field}"  # the path in the message that the client sent
            raise
        return collected.response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        check_fields(request)
        if not request.request_ids:
            raise InvalidRequestError("request_ids", "got none, expected at least one")
        ids = dict.fromkeys(request.request_ids)
        return pb.AbortResponse(aborted_request_ids=filter(self._serving.abort, ids))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        text = self._serving.ready().text
        check_fields(request)
        has_option = request.HasField("add_special_tokens")
        match request.WhichOneof("prompt"):
            case "text":
                add_special_tokens = request.add_special_tokens if has_option else True
                ids = await text.encode(request.text, add_special_tokens=add_special_tokens)
                return pb.TokenizeResponse(token_ids=ids)
            case "chat":
                if has_option:
                    raise InvalidRequestError(
                        "add_special_tokens", "is set, expected unset: a template writes its own"
                    )
                rendered, ids = await text.encode_chat(request.chat)
                return pb.TokenizeResponse(token_ids=ids, rendered=rendered)
            case _:
                raise InvalidRequestError("prompt", "is unset, expected text or chat")

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        backend = self._serving.ready()
        check_fields(request)
        ids = list(request.token_ids)
        validate_token_ids("token_ids", ids, backend.client.model_info.vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await backend.text.decode(ids, skip_special_tokens=skip))

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        backend = self._serving.ready()
        check_fields(request)
        info = backend.client.model_info
        return pb.GetModelInfoResponse(
            model=info.model_name,
            architecture=info.architecture,
            dtype=info.dtype,
            device=info.device,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            parameters=info.num_parameters,
            weight_bytes=info.weight_bytes,
            has_chat_template=backend.text.has_chat_template,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        info = self._serving.ready().client.model_info
        check_fields(request)
        return pb.GetServerInfoResponse(
            version=slipstream_version(),
            kv_cache_bytes=info.kv_cache_bytes,
            kv_bytes_per_token=info.kv_bytes_per_token,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            kv_groups=[
                pb.KVGroup(
                    name=group.name,
                    window=group.window or 0,
                    bytes_per_token=group.bytes_per_token,
                    num_blocks=group.num_blocks,
                )
                for group in info.kv_groups
            ],
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            speculators=info.speculators,
            default_speculator=info.default_speculator,
            max_steps_in_flight=info.max_steps_in_flight,
            numerics=info.numerics,
            startup_seconds=info.startup_seconds,
            uptime_seconds=time.monotonic() - self._started_at,
            max_message_bytes=self._max_message_bytes,
            synthetic_acceptance=info.synthetic_acceptance,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        stats = self._serving.ready().client.stats
        check_fields(request)
        return pb.GetLoadsResponse(
            running_requests=stats.num_running,
            waiting_requests=stats.num_waiting,
            waiting_tokens=stats.num_waiting_tokens,
            kv_cache_usage=stats.kv_cache_usage,
            free_blocks=stats.num_free_blocks + stats.num_cached_blocks,
            draining=self._serving.refusal is not None,
        )


def deadline_of(context: Context) -> float | None:
    """As of time.monotonic()."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


class _Streamed:
    """Sink of a streaming call."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.write = context.write

    async def open(self) -> None:
        # Headers that travel with a message that gets stuck would bar the way of a later status.
        await self._context.send_initial_metadata(())


class _Collected:
    """Sink of a unary call: the messages of a stream as one response."""

    def __init__(self) -> None:
        self._response = pb.GenerateOnceResponse()
        self._texts: list[list[str]] = []  # by choice; joined once

    @property
    def response(self) -> pb.GenerateOnceResponse:
        for choice, texts in zip(self._response.choices, self._texts, strict=True):
            choice.text = "".join(texts)
        return self._response

    async def open(self) -> None:
        pass

    async def write(self, message: pb.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "started":
                self._start(message.index, message.started)
            case "delta":
                choice = self._response.choices[message.index]
                choice.token_ids.extend(message.delta.token_ids)
                choice.logprobs.extend(message.delta.logprobs)
                self._texts[message.index].append(message.delta.text)
            case "finished":
                self._response.choices[message.index].finished.CopyFrom(message.finished)

    def _start(self, index: int, started: pb.Started) -> None:
        while len(self._texts) <= index:  # choices start in any order
            self._response.choices.add(index=len(self._texts))
            self._texts.append([])
        if not self._response.request_id:
            self._response.request_id = started.request_id
            self._response.model = started.model
            self._response.prompt_logprobs.extend(started.prompt_logprobs)

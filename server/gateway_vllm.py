"""vllm.grpc.engine.VllmEngine: what `smg` and the Gateway API inference extension speak to an engine.

A method that is not here is UNIMPLEMENTED: Embed, FlushCache, StartProfile, StopProfile, SubscribeKvEvents. What
messages mean is told in gateway_request.py and gateway_response.py.
"""

# ruff: noqa: N802 - methods have the names of the RPCs

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from engine.client.base import EngineClient
from engine.config import ModelConfig
from engine.errors import EngineUnavailableError, InvalidRequestError
from server.fields import check_fields
from server.gateway_model import GatewayModel, read_gateway_model
from server.gateway_request import gateway_field, to_request
from server.gateway_response import GatewaySink
from server.service import deadline_of
from server.serving import Serving
from server.token_rate import TokenRate
from server.version import slipstream_version

DESCRIPTOR = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
SERVER_TYPE = "vllm-grpc"  # what gateways know this protocol by
CHUNK_BYTES = 64 * 1024  # of the tokenizer's archive
HEALTHY = "serving"

Context = Any  # grpc.aio.ServicerContext


class VllmEngineService:
    """A GatewayProtocol."""

    service_name: str = DESCRIPTOR.full_name

    def __init__(self, serving: Serving, model: ModelConfig) -> None:
        self._serving = serving
        self._config = model
        self._model: GatewayModel | None = None
        self._rate = TokenRate()
        self._started_at = time.monotonic()
        self._last_request_at = 0.0  # Unix time

    async def load(self) -> None:
        self._model = await asyncio.to_thread(read_gateway_model, self._config)

    def engine_started(self, client: EngineClient) -> None:
        client.on_step(self._rate.on_step)

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            method.name: _handler(method, getattr(self, method.name))
            for method in DESCRIPTOR.methods
            if hasattr(self, method.name)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.service_name, handlers),))

    # ---- requests ------------------------------------------------------------------------------------------

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        self._last_request_at = time.time()
        converted = to_request(request, wants_text=self._serving.logs_content)
        sink = GatewaySink(context, request)
        try:
            await self._serving.run(converted, sink, deadline_of(context))
        except InvalidRequestError as error:
            field = gateway_field(error.field)
            if field == error.field:
                raise
            raise InvalidRequestError(field, error.description) from None

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        check_fields(request)
        for request_id in request.request_ids:
            self._serving.abort(request_id)
        return vllm.AbortResponse()

    # ---- state ---------------------------------------------------------------------------------------------

    async def HealthCheck(
        self, request: vllm.HealthCheckRequest, context: Context
    ) -> vllm.HealthCheckResponse:
        refusal = self._serving.refusal
        return vllm.HealthCheckResponse(healthy=refusal is None, message=refusal or HEALTHY)

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: Context
    ) -> vllm.GetModelInfoResponse:
        backend, model = self._serving.ready(), self._loaded()
        info = backend.client.model_info
        return vllm.GetModelInfoResponse(
            model_path=model.path,
            is_generation=True,
            max_context_length=info.max_model_len,
            vocab_size=info.vocab_size,
            served_model_name=info.model_name,
            tokenizer_path=model.tokenizer_path,
            model_type=model.model_type,
            architectures=model.architectures,
            eos_token_ids=info.eos_token_ids,
            pad_token_id=model.pad_token_id,
            bos_token_id=model.bos_token_id,
            max_req_input_len=backend.converter.max_prompt_tokens,
            default_sampling_params_json=json.dumps(dict(model.sampling_defaults)),
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: Context
    ) -> vllm.GetServerInfoResponse:
        info = self._serving.ready().client.model_info
        return vllm.GetServerInfoResponse(
            active_requests=self._serving.num_live,
            is_paused=self._serving.refusal is not None,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            block_size=info.block_size,
            model_dtype=info.dtype,
            max_num_seqs=info.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        client = self._serving.ready().client
        info, stats = client.model_info, client.stats
        load = vllm.SchedulerLoad(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=stats.num_used_blocks * info.block_size,
            max_total_num_tokens=stats.num_blocks * info.block_size,
            token_usage=stats.kv_cache_usage,
            gen_throughput=self._rate.per_second,
            utilization=stats.kv_cache_usage,
            max_running_requests=info.max_num_seqs,
            num_waiting_uncached_tokens=stats.num_waiting_tokens,
        )
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=slipstream_version(),
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        model = self._loaded()
        archive = model.tokenizer_archive
        for start in range(0, len(archive), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(archive)
            chunk = common.GetTokenizerChunk(
                data=archive[start : start + CHUNK_BYTES], sha256=model.tokenizer_sha256 if is_last else ""
            )
            await context.write(chunk)

    def _loaded(self) -> GatewayModel:
        if self._model is None:
            raise EngineUnavailableError("the model is loading")
        return self._model


def _handler(method: MethodDescriptor, behaviour: Any) -> Any:
    """As generated code makes it; methods of the protocol that have no behaviour here need none this way."""
    make = (
        grpc.unary_stream_rpc_method_handler
        if method.server_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(
        behaviour,
        message_factory.GetMessageClass(method.input_type).FromString,
        message_factory.GetMessageClass(method.output_type).SerializeToString,
    )

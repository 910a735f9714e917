"""A gRPC service that plays back what a test gives it: the other side of the client-side commands."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from grpc_status import rpc_status

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc


class FakeService(pb_grpc.GenerationServiceServicer):
    """Streams `responses` to every Generate, then ends with `failure` if there is one; keeps the requests."""

    def __init__(self) -> None:
        self.responses: list[pb.GenerateResponse] = [
            pb.GenerateResponse(started=pb.Started(request_id="r", model="fake", prompt_tokens=5)),
            pb.GenerateResponse(delta=pb.Delta(text="Hel", token_ids=[7])),
            pb.GenerateResponse(delta=pb.Delta(text="lo 🙂", token_ids=[8, 9])),
            pb.GenerateResponse(finished=finished()),
        ]
        self.failure: status_pb2.Status | None = None
        self.requests: list[pb.GenerateRequest] = []
        self.synthetic_acceptance: list[float] = []

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        yield from self.responses
        if self.failure is not None:
            context.abort_with_status(rpc_status.to_status(self.failure))

    def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model="fake", dtype="float32", vocab_size=100, max_model_len=512, eos_token_ids=[2]
        )

    def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            version="0.1.0",
            kv_bytes_per_token=1536,
            block_size=16,
            num_blocks=100,
            kv_groups=[
                pb.KVGroup(name="full", bytes_per_token=512, num_blocks=100),
                pb.KVGroup(name="sliding", window=1024, bytes_per_token=1024, num_blocks=20),
            ],
            speculators=["ngram"],
            default_speculator="none",
            startup_seconds={"load": 1.5},
            max_message_bytes=4 << 20,
            synthetic_acceptance=self.synthetic_acceptance,
        )

    def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.ServicerContext) -> pb.GetLoadsResponse:
        return pb.GetLoadsResponse(running_requests=3, kv_cache_usage=0.25)


def finished() -> pb.Finished:
    return pb.Finished(
        reason=pb.FINISH_REASON_STOP,
        eos_token_id=2,
        usage=pb.Usage(prompt_tokens=5, completion_tokens=3, total_tokens=8),
        timing=pb.Timing(time_to_first_token=0.05, decode=0.5),
        speculation=pb.SpeculationStats(
            method="ngram",
            verifications=2,
            draft_tokens=4,
            accepted_tokens=1,
            acceptance_length=1.5,
            accepted_per_position=[1, 0],
            offered_per_position=[2, 2],
        ),
        seed=11,
    )


def bad_request(field: str, description: str) -> status_pb2.Status:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    return _status(
        code_pb2.INVALID_ARGUMENT,
        "the request is not valid",
        error_details_pb2.BadRequest(field_violations=[violation]),
    )


def queue_full(retry_seconds: int) -> status_pb2.Status:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromSeconds(retry_seconds)
    return _status(code_pb2.RESOURCE_EXHAUSTED, "the queue is full", retry)


def _status(
    code: int, message: str, detail: error_details_pb2.BadRequest | error_details_pb2.RetryInfo
) -> status_pb2.Status:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return status_pb2.Status(code=code, message=message, details=[packed])


@contextmanager
def serve_fake(service: FakeService) -> Iterator[str]:
    """Serve it, with health, on a free port; yields the address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()

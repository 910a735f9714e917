"""Bytes that are no message: INVALID_ARGUMENT from every method of every service, and no traceback in the log."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.gateway import gateway_server, make_frontend_checkpoint
from tests.support.server_fixture import failure_of, running_server
from tools.fuzz.methods import Method, methods
from tools.server_process import free_port

MALFORMED = b"\xff"  # the beginning of a number
SERVED = [method for method in methods() if not method.is_right("UNIMPLEMENTED", MALFORMED)]


async def unreadable(channel: grpc.aio.Channel, method: Method) -> None:
    requests = iter((MALFORMED,)) if method.descriptor.client_streaming else MALFORMED
    call = getattr(channel, method.shape)(method.path)(requests)
    failure = await failure_of(call)
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request"), method.name
    assert failure.message == "request: cannot be parsed"


async def test_every_method_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    async with gateway_server(make_frontend_checkpoint(tmp_path / "tiny"), admin_port=port) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as admin:
            for method in SERVED:
                await unreadable(admin if method.is_admin else server.channel, method)
        for method in SERVED:
            service, name = method.path.strip("/").split("/")
            assert await server.handled(name, "INVALID_ARGUMENT", service) == 1, method.name
    assert [record for record in caplog.records if record.exc_info] == []


async def test_in_a_stream_of_requests_those_before_are_answered() -> None:
    async with running_server() as server:
        listing = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        call = server.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        answers = call(iter((listing, listing, MALFORMED, listing)))
        for _ in range(2):
            answer = reflection_pb2.ServerReflectionResponse.FromString(await answers.read())
            assert answer.HasField("list_services_response")
        assert (await failure_of(answers)).code is grpc.StatusCode.INVALID_ARGUMENT
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        assert [a async for a in stub.ServerReflectionInfo(iter((request,)))]

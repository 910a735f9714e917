"""Headers that are no text: only the call that has them suffers, and no log says what they hold."""

from __future__ import annotations

import asyncio

import pytest

from server.logs import configure_logs
from server.pb.slipstream.v1 import generation_pb2 as pb
from tests.support.server_fixture import running_server
from tests.support.structured_logs import restored_logging
from tools.fuzz.connections import call

TEXTLESS = b"\xff\xfe"
GET_LOADS = b"/slipstream.v1.GenerationService/GetLoads"
CALLS = {
    "path": call(b"/" + TEXTLESS),
    "token": call(GET_LOADS, (b"authorization", b"Bearer a-secret-" + TEXTLESS)),
    "name": call(GET_LOADS, (b"x-" + TEXTLESS, b"a-secret")),
}


async def say(port: int, data: bytes) -> None:
    """And wait until it was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = b""
    while b"grpc-status" not in answer:
        part = await reader.read(4096)
        assert part, "the connection was closed without a status"
        answer += part
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("name", CALLS)
async def test_the_server_goes_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with restored_logging():
        configure_logs("debug", "json")
        async with running_server() as server:
            await say(server.app.port, CALLS[name])
            assert not (await server.stub.GetLoads(pb.GetLoadsRequest())).draining
    shown = capsys.readouterr().err
    assert "a-secret" not in shown
    assert "Traceback" not in shown

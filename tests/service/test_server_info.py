"""What a server tells of itself."""

from __future__ import annotations

from server.pb.slipstream.v1 import generation_pb2 as pb
from tests.support.server_fixture import running_server


async def test_the_kv_groups_are_told() -> None:
    async with running_server() as server:
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
    full, sliding = info.kv_groups
    assert (full.name, full.window, full.bytes_per_token, full.num_blocks) == ("full", 0, 24, 100)
    assert (sliding.name, sliding.window, sliding.bytes_per_token, sliding.num_blocks) == (
        "sliding",
        32,
        40,
        60,
    )
    assert info.kv_bytes_per_token == 24 + 40
    assert info.numerics == "fast"

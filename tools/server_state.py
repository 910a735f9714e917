"""What a server holds while nothing runs, and whether it is more than before."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import grpc
import msgspec

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.server_process import ServerProcess, descendants

MAX_GROWTH = 64 * 2**20  # bytes; allocators keep some of what a busy time needed
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)  # which ends with its channel
_SETTLE_SECONDS = 20.0
_QUIET_SECONDS = 1.0  # in which a server notices that a client has left


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """By a server that nobody is connected to."""

    frontend_bytes: int  # resident
    frontend_files: int  # descriptors
    processes: int
    free_blocks: int


def resident_bytes(pid: int) -> int:
    """Of one process (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


async def held_when_idle(server: ServerProcess, before: Held | None = None) -> Held:
    """Waits until no request is left, and, for so long as it may take, until nothing is more than `before`."""
    give_up = time.monotonic() + _SETTLE_SECONDS
    while True:
        is_idle, free_blocks = await _loads(server.address)
        gc.collect()  # calls of ours that failed: each keeps its connection open
        await asyncio.sleep(_QUIET_SECONDS)
        held = Held(
            frontend_bytes=resident_bytes(server.pid),
            frontend_files=len(list(Path(f"/proc/{server.pid}/fd").iterdir())),
            processes=1 + len(descendants(server.pid)),
            free_blocks=free_blocks,
        )
        if (is_idle and (before is None or not leaks(before, held))) or time.monotonic() > give_up:
            return held


def leaks(before: Held, after: Held) -> list[str]:
    """In words."""
    found = []
    if after.free_blocks != before.free_blocks:
        found.append(f"free blocks: got {after.free_blocks}, expected {before.free_blocks}")
    if after.frontend_files > before.frontend_files:
        found.append(f"file descriptors: got {after.frontend_files}, expected {before.frontend_files}")
    if after.processes != before.processes:
        found.append(f"processes: got {after.processes}, expected {before.processes}")
    if after.frontend_bytes > before.frontend_bytes + MAX_GROWTH:
        found.append(f"resident bytes: got {after.frontend_bytes}, expected about {before.frontend_bytes}")
    return found


async def _loads(address: str) -> tuple[bool, int]:
    """Whether nothing runs or waits, and the free blocks."""
    async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
        loads = await pb_grpc.GenerationServiceStub(channel).GetLoads(pb.GetLoadsRequest())
    return not (loads.running_requests or loads.waiting_requests), loads.free_blocks

"""The admin service of a real server: what it changes reaches the engine process, and generation goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from server.pb.slipstream.v1 import admin_pb2, admin_pb2_grpc
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.server_process import ServerProcess, free_port


@pytest.fixture
def administered(
    tiny_checkpoint: Path, tmp_path: Path
) -> Iterator[tuple[ServerProcess, pb_grpc.GenerationServiceStub, admin_pb2_grpc.AdminServiceStub]]:
    port = free_port()
    arguments = ["--num-threads", "1", "--speculator", "ngram,k=4", "--speculator", "suffix,k=3"]
    arguments += ["--admin-port", str(port), "--profile-directory", str(tmp_path / "traces")]
    with (
        ServerProcess(tiny_checkpoint, tmp_path / "server.log", arguments=arguments) as process,
        grpc.insecure_channel(process.address) as channel,
        grpc.insecure_channel(f"127.0.0.1:{port}") as admin,
    ):
        yield process, pb_grpc.GenerationServiceStub(channel), admin_pb2_grpc.AdminServiceStub(admin)


def test_an_administrator_watches_configures_profiles_and_drains(
    administered: tuple[ServerProcess, pb_grpc.GenerationServiceStub, admin_pb2_grpc.AdminServiceStub],
) -> None:
    process, stub, admin = administered
    request = pb.GenerateRequest(
        request_id="r",
        text="the dog the dog the dog",
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=64, ignore_eos=True),
    )

    def ask() -> pb.Choice:
        return stub.GenerateOnce(pb.GenerateOnceRequest(request=request)).choices[0]

    listed = admin.ListSpeculators(admin_pb2.ListSpeculatorsRequest())
    assert [(item.method, item.num_speculative_tokens) for item in listed.speculators] == [
        ("ngram", 4),
        ("suffix", 3),
    ]
    with_drafts = ask()
    disabled = [admin_pb2.SpeculatorSettings(method=name, enabled=False) for name in ("ngram", "suffix")]
    admin.ConfigureSpeculation(
        admin_pb2.ConfigureSpeculationRequest(speculators=disabled, default_method="ngram")
    )
    assert stub.GetServerInfo(pb.GetServerInfoRequest()).default_speculator == "ngram"
    without = ask()
    assert without.finished.speculation.draft_tokens == 0
    assert without.token_ids == with_drafts.token_ids
    admin.SetLogLevel(admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_DEBUG))
    profiling = admin.Profile.future(admin_pb2.ProfileRequest(num_steps=2))
    stream = stub.Generate(request)
    next(stream)
    state = admin.DumpScheduler(admin_pb2.DumpSchedulerRequest())
    assert [item.request_id for item in state.requests] in (["r"], [])  # [] once it has finished
    assert Path(profiling.result().path).stat().st_size > 0
    assert admin.Drain(admin_pb2.DrainRequest()).running_requests in (0, 1)
    *_, last = stream
    assert last.finished.usage.completion_tokens == 64
    assert process.wait() == 0

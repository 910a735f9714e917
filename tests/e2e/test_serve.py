"""The whole way, process by process: command line, frontend, engine process, client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.server_process import ServerProcess

COMMAND_TIMEOUT = 60
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def greedy(text: str, max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def slipstream(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False)


def test_a_generation_is_streamed_from_start_to_finish(stub: pb_grpc.GenerationServiceStub) -> None:
    responses = list(stub.Generate(greedy("the quick brown fox", 12)))
    events = [response.WhichOneof("event") for response in responses]
    assert events[0] == "started"
    assert events[-1] == "finished"
    assert set(events[1:-1]) == {"delta"}
    token_ids = [token_id for response in responses for token_id in response.delta.token_ids]
    text = "".join(response.delta.text for response in responses)
    assert len(token_ids) == 12
    assert text == stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids)).text
    finished = responses[-1].finished
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert finished.usage.completion_tokens == 12
    assert finished.usage.prompt_tokens == responses[0].started.prompt_tokens > 0


def test_the_stream_and_the_whole_answer_agree(stub: pb_grpc.GenerationServiceStub) -> None:
    request = greedy("a request is", 12)
    streamed = "".join(response.delta.text for response in stub.Generate(request))
    (choice,) = stub.GenerateOnce(pb.GenerateOnceRequest(request=request)).choices
    assert choice.text == streamed


def test_generate_on_the_command_line_prints_the_same_text(
    server: ServerProcess, stub: pb_grpc.GenerationServiceStub
) -> None:
    options = ["--raw", "--temperature", "0", "--max-tokens", "8", "--address", server.address]
    result = slipstream("generate", "the dog sleeps", *options)
    request = greedy("the dog sleeps", 8)
    request.stopping.ignore_eos = False
    expected = "".join(response.delta.text for response in stub.Generate(request))
    assert (result.returncode, result.stdout) == (0, expected)


def test_info_and_bench_on_the_command_line(server: ServerProcess) -> None:
    assert "tiny-llama" in slipstream("info", "--address", server.address).stdout
    options = ["--num-requests", "4", "--concurrency", "2", "--input-len", "8", "--output-len", "8"]
    result = slipstream("bench", "--address", server.address, *options)
    assert result.returncode == 0, result.stderr
    assert "4 of 4 requests completed" in result.stdout


def test_a_port_in_use_ends_the_second_server_with_one_line(
    server: ServerProcess, tiny_checkpoint: Path
) -> None:
    options = ["--host", "127.0.0.1", "--port", str(server.port), "--metrics-port", "0"]
    result = slipstream("serve", "--model", str(tiny_checkpoint), *options)
    assert result.returncode != 0
    assert str(server.port) in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_checkpoint_ends_the_server_with_one_line(tmp_path: Path) -> None:
    options = ["--port", "0", "--metrics-port", "0"]
    result = slipstream("serve", "--model", str(tmp_path / "nothing-here"), *options)
    assert result.returncode != 0
    assert "nothing-here" in result.stderr
    assert "Traceback" not in result.stderr


def test_sigterm_lets_running_streams_finish(own_server: ServerProcess) -> None:
    with grpc.insecure_channel(own_server.address) as channel:
        stream = pb_grpc.GenerationServiceStub(channel).Generate(greedy("a step computes", 200))
        next(stream)
        own_server.terminate()
        *_, last = stream
    assert last.finished.usage.completion_tokens == 200
    assert own_server.wait() == 0


def test_when_the_engine_dies_streams_end_health_turns_and_another_engine_serves(
    own_server: ServerProcess,
) -> None:
    with grpc.insecure_channel(own_server.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        (before,) = stub.GenerateOnce(pb.GenerateOnceRequest(request=greedy("a step", 12))).choices
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(health).status == SERVING
        stream = stub.Generate(greedy("a step computes", 400))
        next(stream)
        own_server.kill_engine()
        with pytest.raises(grpc.RpcError) as failure:
            list(stream)
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert next(health).status == NOT_SERVING
        assert next(health).status == SERVING
        (after,) = stub.GenerateOnce(pb.GenerateOnceRequest(request=greedy("a step", 12))).choices
        assert after.text == before.text
    assert "engine died, starting another" in own_server.log_tail()
    own_server.terminate()
    assert own_server.wait() == 0

"""`slipstream generate`, `info` and `bench` against a service that plays back answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from server.bench.schema import read_result
from server.cli.bench import bench
from server.cli.connection import EXIT_FAILED, EXIT_UNAVAILABLE
from server.cli.generate import generate
from server.cli.info import info
from server.pb.slipstream.v1 import generation_pb2 as pb
from tests.support.fake_service import FakeService, bad_request, queue_full, serve_fake
from tools.server_process import free_port

Invoke = Callable[..., Result]
USAGE_ERROR = 2


def run(command: Callable[..., None], *arguments: str, stdin: str | None = None) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def address(service: FakeService) -> Iterator[str]:
    with serve_fake(service) as address:
        yield address


def test_only_the_text_goes_to_stdout(address: str) -> None:
    result = run(generate, "hi", "--address", address, "--stats")
    assert result.exit_code == 0
    assert result.stdout == "Hello 🙂"
    assert "5 prompt tokens (0 cached), 3 tokens, first after 50 ms, then 4.0 tokens/s" in result.stderr
    assert "acceptance length 1.50 (ngram), finish: stop (eos_token_id 2), seed 11" in result.stderr


def test_options_become_the_request_and_what_is_not_given_stays_unset(
    address: str, service: FakeService
) -> None:
    options = ["--max-tokens", "9", "--temperature", "0", "--seed", "-4", "--stop", "a", "--stop", "b"]
    options += ["--method", "ngram", "--k", "0"]
    run(generate, "hi", "--address", address, "--system", "be brief", *options)
    (request,) = service.requests
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]
    assert request.stopping.max_tokens == 9
    assert list(request.stopping.stop) == ["a", "b"]
    assert request.sampling.HasField("temperature")
    assert request.sampling.seed == -4
    assert request.speculation == pb.SpeculationParams(method="ngram", num_speculative_tokens=0)
    assert not request.sampling.HasField("top_p")
    assert not request.output.HasField("logprobs")
    run(generate, "hi", "--address", address)
    assert service.requests[-1].speculation == pb.SpeculationParams()


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--json-schema", "FILE"], "json_schema", "from a file"),
        (["--grammar", "FILE"], "grammar", "from a file"),
        (["--regex", "a*"], "regex", "a*"),
        (["--choice", "yes", "--choice", "no"], "choice", pb.ChoiceConstraint(choices=["yes", "no"])),
    ],
)
def test_constraints_become_the_request(
    options: list[str], field: str, value: object, address: str, service: FakeService, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("from a file")
    run(generate, "hi", "--address", address, *(str(file) if part == "FILE" else part for part in options))
    (request,) = service.requests
    assert request.WhichOneof("constraint") == field
    assert getattr(request, field) == value


@pytest.mark.parametrize("regex", ["a", ""])
def test_one_constraint_at_most(regex: str, address: str) -> None:
    result = run(generate, "hi", "--address", address, "--regex", regex, "--choice", "b")
    assert result.exit_code == USAGE_ERROR
    assert "give one at most" in " ".join(result.stderr.replace("│", "").split())


def test_a_raw_prompt_can_come_from_stdin(address: str, service: FakeService) -> None:
    run(generate, "-", "--raw", "--address", address, stdin="once upon\n")
    assert service.requests[0].text == "once upon\n"


def test_json_prints_one_message_a_line(address: str) -> None:
    result = run(generate, "hi", "--json", "--address", address)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[0]["started"]["request_id"] == "r"
    assert lines[2]["delta"]["token_ids"] == [8, 9]
    assert lines[3]["finished"]["reason"] == "FINISH_REASON_STOP"


def test_logprobs_are_shown_on_stderr(address: str, service: FakeService) -> None:
    token = pb.TokenLogprob(token_id=7, logprob=-0.5, rank=1, text="Hel")
    service.responses[1].delta.logprobs.add(token=token, top=[token])
    result = run(generate, "hi", "--logprobs", "1", "--address", address)
    assert result.stdout == "Hello 🙂"
    assert "'Hel' -0.500" in result.stderr


def test_a_refused_request_is_one_line_with_its_field(address: str, service: FakeService) -> None:
    service.responses = []
    service.failure = bad_request("sampling.top_p", "got 7.0, expected > 0 and <= 1")
    result = run(generate, "hi", "--address", address)
    assert result.exit_code == EXIT_FAILED
    assert result.stderr == (
        "error: INVALID_ARGUMENT: the request is not valid; sampling.top_p: got 7.0, expected > 0 and <= 1 "
        f"(from {address})\n"
    )


def test_a_full_queue_says_when_to_try_again(address: str, service: FakeService) -> None:
    service.failure = queue_full(retry_seconds=2)
    result = run(generate, "hi", "--address", address)
    assert result.stderr.startswith("error: RESOURCE_EXHAUSTED: the queue is full; try again after 2 s")


@pytest.mark.parametrize("command", [generate, info, bench])
def test_when_nobody_answers_the_exit_status_says_so(command: Callable[..., None]) -> None:
    arguments = ["hi"] if command is generate else []
    result = run(command, *arguments, "--address", f"127.0.0.1:{free_port()}")
    assert result.exit_code == EXIT_UNAVAILABLE
    assert result.stderr.startswith("error: UNAVAILABLE: ")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", [generate, info, bench])
def test_an_address_that_is_none_is_wrong_usage(command: Callable[..., None]) -> None:
    words = ["hi"] if command is generate else []
    result = run(command, *words, "--address", " ")
    assert result.exit_code == USAGE_ERROR
    assert "address: got ' ', expected host:port" in result.stderr


def test_a_system_message_needs_a_chat(address: str) -> None:
    assert run(generate, "hi", "--raw", "--system", "x", "--address", address).exit_code == USAGE_ERROR


def test_info_as_a_table(address: str) -> None:
    result = run(info, "--address", address)
    assert result.exit_code == 0
    for shown in ("SERVING", "1.5 KiB per token", "100 blocks: 1,600 tokens of 512 B", "ngram", "25.0%"):
        assert shown in result.stdout
    assert "20 blocks: 320 tokens of 1 KiB, window 1,024" in result.stdout


def test_info_as_json_has_every_field_and_plain_numbers(address: str) -> None:
    answer = json.loads(run(info, "--json", "--address", address).stdout)
    assert answer["health"] == "SERVING"
    assert answer["model"]["eos_token_ids"] == [2]
    assert answer["server"]["kv_bytes_per_token"] == 1536
    assert answer["server"]["kv_groups"][1] == {
        "name": "sliding",
        "window": 1024,
        "bytes_per_token": 1024,
        "num_blocks": 20,
    }
    assert answer["server"]["startup_seconds"] == {"load": 1.5}
    assert answer["load"]["draining"] is False


def test_bench_sends_what_was_asked_and_writes_a_result(
    address: str, service: FakeService, tmp_path: Path
) -> None:
    output = tmp_path / "result.json"
    options = ["--num-requests", "6", "--warmup", "2", "--concurrency", "3", "--input-len", "10"]
    result = run(bench, "--address", address, *options, "--output", str(output))
    assert result.exit_code == 0
    assert len(service.requests) == 8
    assert {len(request.token_ids.ids) for request in service.requests} == {10}
    load = read_result(output).loads["load"]
    assert (load.num_completed, load.completion_tokens, load.num_messages) == (6, 18, 12)
    assert load.speculation[0].acceptance_length == pytest.approx(1.5)
    assert load.speculation[0].acceptance_rate_by_position == [0.5, 0.0]
    assert "fake: 6 of 6 requests completed" in result.stdout


def test_bench_marks_every_figure_of_a_server_with_synthetic_acceptance(
    address: str, service: FakeService, tmp_path: Path
) -> None:
    service.synthetic_acceptance = [0.8, 0.6]
    output = tmp_path / "result.json"
    options = ["--num-requests", "2", "--warmup", "0", "--output", str(output)]
    result = run(bench, "--address", address, *options)
    load = read_result(output).loads["load"]
    assert load.synthetic_acceptance == [0.8, 0.6]
    assert [row.is_synthetic for row in load.speculation] == [True]
    assert "synthetic: drafts were accepted at rates 0.8, 0.6, not by the model" in result.stdout
    assert result.stdout.count("(synthetic)") == 3, "throughput, latencies, the row of the draft method"
    service.synthetic_acceptance = []
    result = run(bench, "--address", address, *options)
    load = read_result(output).loads["load"]
    assert (load.synthetic_acceptance, load.speculation[0].is_synthetic) == ([], False)
    assert "synthetic" not in result.stdout


def test_bench_at_a_rate(address: str, service: FakeService) -> None:
    result = run(bench, "--address", address, "--num-requests", "5", "--rate", "1000", "--warmup", "0")
    assert result.exit_code == 0
    assert len(service.requests) == 5


def test_bench_counts_errors_and_fails_when_nothing_completed(address: str, service: FakeService) -> None:
    service.responses = []
    service.failure = queue_full(retry_seconds=1)
    result = run(bench, "--address", address, "--num-requests", "3", "--warmup", "0")
    assert result.exit_code == EXIT_FAILED
    assert "3 requests ended with RESOURCE_EXHAUSTED" in result.stdout
    assert "time to first token" not in result.stdout  # there was none
    assert "first failure: RESOURCE_EXHAUSTED: the queue is full" in result.stderr


def test_no_title_of_a_report_is_cut_on_a_terminal_of_80_columns(address: str) -> None:
    result = run(bench, "--address", address, "--num-requests", "1", "--warmup", "0")
    assert "messages/s" in result.stdout
    assert "verifications" in result.stdout
    assert "…" not in result.stdout


@pytest.mark.parametrize("command", [generate, info, bench])
def test_a_certificate_that_no_tls_would_show_is_wrong_usage(
    command: Callable[..., None], address: str, tmp_path: Path
) -> None:
    arguments = ["hi"] if command is generate else []
    result = run(command, *arguments, "--address", address, "--client-cert", str(tmp_path / "own.pem"))
    assert result.exit_code == USAGE_ERROR
    assert "tls_ca" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "1", "--concurrency", "1"],
        ["--dataset", "missing.jsonl"],
        ["--input-len", "1000", "--output-len", "25"],  # more than the context
    ],
    ids=" ".join,
)
def test_bench_refuses_wrong_usage(address: str, arguments: list[str]) -> None:
    assert run(bench, "--address", address, *arguments).exit_code == USAGE_ERROR


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-tokens", str(2**32)], "Value out of range: 4294967296"),
        (["--seed", str(2**63)], "Value out of range: 9223372036854775808"),
        (["--k", str(2**32)], "Value out of range: 4294967296"),
        (["--stop", "\udcff"], "surrogates not allowed"),
        (["--json-schema", "BINARY"], "can't decode byte 0xff"),
        (["--token", "0123456789abcdef\n"], "is there a newline at its end?"),
    ],
)
def test_what_no_request_can_hold_is_wrong_usage(
    options: list[str], said: str, address: str, service: FakeService, tmp_path: Path
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    arguments = [str(binary) if option == "BINARY" else option for option in options]
    result = run(generate, "hi", "--address", address, *arguments)
    assert result.exit_code == USAGE_ERROR
    assert said in " ".join(result.stderr.replace("│", "").split())
    assert not service.requests


@pytest.mark.parametrize(
    "arguments", [["--output-len", str(2**32)], ["--seed", str(2**63 - 1)], ["--dataset", "SURROGATE"]]
)
def test_a_load_that_no_request_can_hold_is_wrong_usage(
    arguments: list[str], address: str, service: FakeService, tmp_path: Path
) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "\\ud800"}')
    options = [str(dataset) if argument == "SURROGATE" else argument for argument in arguments]
    result = run(bench, "--num-requests", "2", "--address", address, *options)
    assert result.exit_code == USAGE_ERROR
    assert "the requests cannot be sent" in " ".join(result.stderr.replace("│", "").split())
    assert not service.requests


def test_a_result_that_cannot_be_written_is_one_line(address: str, tmp_path: Path) -> None:
    result = run(bench, "--num-requests", "1", "--address", address, "--output", str(tmp_path))
    assert result.exit_code == EXIT_FAILED
    assert "time to first token" in result.stdout  # the figures are not lost
    assert result.stderr.splitlines()[-1] == f"error: [Errno 21] Is a directory: '{tmp_path}'"

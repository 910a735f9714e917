"""What the log says of a call: id, status and figures, never what was asked or answered."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from server.logs import LogFormat, configure_logs
from server.pb.slipstream.v1 import generation_pb2 as pb
from tests.support.server_fixture import collect, failure_of, running_server, text_request
from tests.support.structured_logs import restored_logging


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    with restored_logging():
        yield


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]


async def test_a_call_is_one_line_with_its_id_status_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    async with running_server() as server:
        await collect(server.stub.Generate(text_request("the secret dog", request_id="r1")))
        await server.app.live.wait_until_empty()
        num_prompt_tokens = len(server.engine.requests["r1"].prompt_token_ids)
    logged = lines(capsys)
    (call,) = [line for line in logged if line["event"] == "call ended"]
    assert (call["request_id"], call["method"], call["status"]) == ("r1", "Generate", "OK")
    assert (call["prompt_tokens"], call["completion_tokens"]) == (num_prompt_tokens, num_prompt_tokens + 1)
    assert (call["finish"], call["level"]) == ("stop", "info")
    assert "secret" not in json.dumps(logged)


async def test_a_refused_call_says_which_field_and_not_what_it_held(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("info", "json")
    async with running_server() as server:
        secret = pb.ChatMessage(role="a secret role", content="x")
        request = pb.GenerateRequest(request_id="r1", chat=pb.ChatPrompt(messages=[secret]))
        await failure_of(server.stub.Generate(request))
    logged = lines(capsys)
    (call,) = [line for line in logged if line["event"] == "call ended"]
    assert (call["status"], call["reason"]) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert call["field"] == "chat.messages[0].role"
    assert "secret" not in json.dumps(logged)


async def test_a_refused_model_is_logged_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    async with running_server() as server:
        await failure_of(server.stub.Generate(text_request(model="x" * 1_000_000)))
    (call,) = [line for line in lines(capsys) if line["event"] == "call ended"]
    assert (call["status"], call["reason"]) == ("NOT_FOUND", "UNKNOWN_MODEL")
    assert str(call["error"]).startswith("got model 'xxx")
    assert len(json.dumps(call)) < 2000


async def test_no_level_writes_a_prompt_or_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("debug", "json")
    async with running_server() as server:
        secret = "the secret dog"  # the engine echoes it
        answer = await server.stub.GenerateOnce(pb.GenerateOnceRequest(request=text_request(secret)))
        assert "secret" in answer.choices[0].text
        await server.stub.Tokenize(pb.TokenizeRequest(text=secret))
        await failure_of(server.stub.Generate(text_request(secret, cache_salt="secret" * 100)))
        cancelled = server.stub.Generate(text_request(secret))
        cancelled.cancel()
        await server.app.live.wait_until_empty()
    shown = capsys.readouterr().err
    assert "call ended" in shown
    assert "secret" not in shown


async def test_content_is_logged_by_a_server_that_was_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    async with running_server(log_content=True) as server:
        await collect(server.stub.Generate(text_request("the secret dog", request_id="r1", n=2)))
        await server.app.live.wait_until_empty()
    (content,) = [line for line in lines(capsys) if line["event"] == "content"]
    assert content["request_id"] == "r1"
    assert json.loads(str(content["request"]))["text"] == "the secret dog"
    assert content["answers"] == ["the secret dog"] * 2


async def test_a_request_that_json_cannot_say_is_logged_and_answered_like_any_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("info", "json")
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="the dog")])
    chat.template_arguments["depth"] = float("nan")
    async with running_server(log_content=True) as server:
        await collect(server.stub.Generate(pb.GenerateRequest(chat=chat)))
        await server.app.live.wait_until_empty()
    (content,) = [line for line in lines(capsys) if line["event"] == "content"]
    assert "the dog" in str(content["request"])


def test_a_traceback_shows_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    formats: tuple[LogFormat, ...] = ("json", "console")
    for log_format in formats:
        configure_logs("info", log_format)
        prompt = "a secret"
        try:
            len(prompt) / 0
        except ZeroDivisionError:
            structlog.get_logger("test").exception("failed")
        shown = capsys.readouterr().err
        assert "ZeroDivisionError" in shown
        assert "a secret" not in shown.replace('prompt = "a secret"', "")


def test_the_standard_library_s_logging_goes_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("warning", "json")
    logging.getLogger("engine").warning("the engine says %s", "so")
    logging.getLogger("engine").info("unheard")
    (line,) = lines(capsys)
    assert (line["event"], line["level"], line["logger"]) == ("the engine says so", "warning", "engine")

"""Logs that cannot be written: no request and no process waits for them or ends with them, and what is lost is told."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.client.process import ProcessEngineClient
from engine.log_stream import LossyHandler, lossy
from engine.messages import FinishInfo
from server.logs import configure_logs
from tests.support.fake_core import fake_config, fake_request
from tests.support.server_fixture import collect, running_server, text_request
from tests.support.structured_logs import restored_logging

FAILURES = [
    OSError(errno.ENOSPC, "No space left on device"),
    BrokenPipeError(),
    ValueError("closed file"),
    None,
]


class Stream:
    """Fails as long as it is told to; None: it would have to wait."""

    def __init__(self, *failures: Exception | None) -> None:
        self.failures = list(failures)
        self.data = b""

    def write(self, data: bytes) -> int | None:
        if self.failures:
            failure = self.failures.pop(0)
            if failure is None:
                return None
            raise failure
        self.data += data
        return len(data)

    def close(self) -> None:
        pass


def log(handler: logging.Handler, *texts: str) -> None:
    for text in texts:
        handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    with restored_logging():
        yield


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
def test_lines_that_cannot_be_written_are_counted_and_told_once(failure: Exception | None) -> None:
    stream = Stream(*[failure] * 3)
    log(LossyHandler(stream), "a", "b", "c", "d", "e")
    assert stream.data.decode().splitlines() == ["lost 3 log lines", "d", "e"]


def test_after_a_line_that_was_cut_the_next_one_begins_its_own() -> None:
    class Cutting(Stream):
        def write(self, data: bytes) -> int:
            part = data[:4] if b"long" in data else data
            self.data += part
            return len(part)

    stream = Cutting()
    log(LossyHandler(stream), "a long one", "b")
    assert stream.data.decode().splitlines() == ["a lo", "lost 1 log lines", "b"]


def test_what_is_not_text_in_utf8_is_escaped() -> None:
    stream = Stream()
    log(LossyHandler(stream), "half \ud800 a pair")
    assert stream.data == b"half \\ud800 a pair\n"


def test_a_process_without_standard_error_logs_nothing() -> None:
    log(lossy(None), "a")


def test_a_pipe_that_nobody_reads_holds_nothing_up() -> None:
    reader, writer = os.pipe()
    with (
        io.FileIO(reader) as unread,
        io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as stream,
    ):
        handler = lossy(stream)
        log(handler, *["x" * 4000] * 100)  # more than a pipe takes
        assert os.get_blocking(writer)  # for others it is what it was
        os.set_blocking(reader, False)
        kept = unread.read().splitlines()
        assert 1 <= len(kept) < 100
        log(handler, "heard")
        assert unread.read().splitlines() == [b"lost %d log lines" % (100 - len(kept)), b"heard"]
        handler.close()


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
async def test_a_server_serves_without_its_log(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    configure_logs("debug", "json")
    (handler,) = logging.getLogger().handlers
    stream = Stream(*[failure] * 100_000)
    monkeypatch.setattr(handler, "_stream", stream)
    async with running_server() as server:
        for i in range(3):
            messages = await collect(server.stub.Generate(text_request(request_id=f"r{i}")))
            assert messages[-1].HasField("finished")
        stream.failures.clear()
        await collect(server.stub.Generate(text_request(request_id="heard")))
        await server.app.live.wait_until_empty()
    lines = [json.loads(line) for line in stream.data.splitlines()]
    assert (lines[0]["event"].split()[0], lines[0]["level"]) == ("lost", "warning")
    ended = [line for line in lines if line["event"] == "call ended" and line.get("request_id") == "heard"]
    assert [line["status"] for line in ended] == ["OK"]


@pytest.mark.parametrize("kind", ["full disk", "full pipe", "closed pipe"])
async def test_an_engine_process_works_without_its_log(kind: str, tmp_path: Path) -> None:
    path, reader = Path("/dev/full"), -1
    if kind != "full disk":
        path = tmp_path / "log"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    redirected = ("sh", "-c", 'exec "$@" 2>"$0"', str(path), sys.executable, "-c", _TALKATIVE_ENGINE)
    client = ProcessEngineClient(fake_config(), command=redirected)
    await client.start()
    if kind == "closed pipe":
        os.close(reader)
    try:
        stream = client.submit(fake_request("r", max_tokens=200))  # more lines than a pipe takes
        finish: FinishInfo | None = None
        while finish is None:
            finish = (await stream.next()).finish
        assert finish.reason == "length"
    finally:
        await client.stop()
        if kind == "full pipe":
            os.close(reader)


_TALKATIVE_ENGINE = """\
import logging, sys
from engine.main import main
from tests.support.fake_core import FakeCore

class Talkative(FakeCore):
    def step(self):
        logging.getLogger("engine").warning("x" * 1000)
        return super().step()

sys.exit(main(core_factory=Talkative))
"""

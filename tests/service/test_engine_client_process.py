"""The engine as a process: how it dies, what it leaves behind, and that it never outlives its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from engine.client import process
from engine.client.base import RequestStream
from engine.client.engine_process import EngineProcess
from engine.client.process import ProcessEngineClient
from engine.errors import ConfigError, EngineUnavailableError
from engine.messages import FinishInfo, FromEngine, RequestOutput, StepMessage
from engine.stats import EngineStats
from tests.support.fake_core import FakeCore, expected_tokens, fake_config, fake_request

ROOT = Path(__file__).parent.parent.parent
FAKE_ENGINE = (sys.executable, "-m", "tests.support.fake_engine_main")
ENDLESS = 10_000_000
TURNS = 20  # of the event loop: all that is ready has happened

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ipc sockets and signals of POSIX")


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty directory for temporary files; its path is short, as those of sockets must be."""
    tmp_path_factory.getbasetemp()  # made now: later it would be made in here
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


async def started(model: str = "fake", **options: float) -> ProcessEngineClient:
    client = ProcessEngineClient(fake_config(model), command=FAKE_ENGINE, **options)
    await client.start()
    return client


async def read_on(stream: RequestStream) -> FinishInfo:
    """To the end of the stream."""
    while (finish := (await stream.next()).finish) is None:
        pass
    return finish


async def test_a_killed_engine_ends_the_streams_and_says_why(scratch: Path) -> None:
    client = await started()
    streams = [client.submit(fake_request(f"r{i}", ENDLESS)) for i in range(3)]
    for stream in streams:
        await stream.next()
    os.kill(client.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineUnavailableError, match="stopped working"):
            await read_on(stream)
    assert str(await client.wait_failed()) == "the engine process was killed by SIGKILL"
    assert not client.is_alive
    with pytest.raises(EngineUnavailableError):
        client.submit(fake_request("late"))
    await client.stop()
    assert list(scratch.iterdir()) == []


async def test_tokens_that_were_sent_before_the_engine_died_are_read_first() -> None:
    client = await started()
    has_come = asyncio.Event()  # what the engine has sent may still be in its own process, and die with it
    client.on_step(lambda outputs, step: has_come.set())
    request = fake_request("r", ENDLESS)
    stream = client.submit(request)
    await has_come.wait()
    os.kill(client.pid, signal.SIGKILL)
    assert isinstance(await client.wait_failed(), EngineUnavailableError)
    token_ids = (await stream.next()).token_ids
    assert token_ids == expected_tokens(request, 0, len(token_ids)) != []
    with pytest.raises(EngineUnavailableError):
        await stream.next()
    await client.stop()


class ScriptedProcess:
    """Stands for EngineProcess: the test says what it sends, and when it has ended."""

    pid = 0

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.bind("inproc://engine")
        self._engine: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PAIR)
        self._engine.connect("inproc://engine")
        self._has_ended = asyncio.Event()

    def send(self, *messages: FromEngine) -> None:
        for message in messages:
            self._engine.send(msgspec.msgpack.encode(message))

    def end(self) -> None:
        self._has_ended.set()

    async def wait(self) -> str:
        await self._has_ended.wait()
        return "exited with status 1"

    async def stop(self, timeout: float) -> None:
        self.end()

    async def close(self) -> None:
        self._engine.close()
        self.socket.close()
        self._context.term()


async def test_an_engine_that_ended_is_read_until_nothing_has_come_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedProcess()

    async def spawn(command: object, config_json: bytes) -> ScriptedProcess:
        engine.send(FakeCore(fake_config(), lambda progress: None).model_info)
        return engine

    def step(*token_ids: int) -> StepMessage:
        return StepMessage(
            outputs=[RequestOutput(request_id="r", token_ids=list(token_ids))], stats=EngineStats()
        )

    monkeypatch.setattr(EngineProcess, "spawn", spawn)
    monkeypatch.setattr(process, "QUIET_MS", 60_000)
    client = await started()
    stream = client.submit(fake_request("r", ENDLESS))
    engine.end()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    engine.send(step(1), step(2))  # the reader takes both, before whoever polls looks at what woke it
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert client.is_alive
    monkeypatch.setattr(process, "QUIET_MS", 1)
    engine.send(step(3), step(4))
    assert str(await client.wait_failed()) == "the engine process exited with status 1"
    assert (await stream.next()).token_ids == [1, 2, 3, 4]
    with pytest.raises(EngineUnavailableError):
        await stream.next()
    await client.stop()


async def test_an_engine_that_exits_while_it_starts_is_reported(scratch: Path) -> None:
    with pytest.raises(EngineUnavailableError, match="the engine process exited with status 3"):
        await started("exit")
    assert list(scratch.iterdir()) == []


async def test_a_command_that_does_not_exist_is_reported(scratch: Path) -> None:
    client = ProcessEngineClient(fake_config(), command=("/no/such/python",))
    with pytest.raises(EngineUnavailableError, match=r"cannot start the engine process: .*/no/such/python"):
        await client.start()
    assert list(scratch.iterdir()) == []


async def test_cancelling_the_start_leaves_nothing_behind(scratch: Path) -> None:
    never_ready = (sys.executable, "-c", "import sys; sys.stdin.read()")
    client = ProcessEngineClient(fake_config(), command=never_ready)
    loading = asyncio.ensure_future(client.start())
    while not list(scratch.iterdir()):
        await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert list(scratch.iterdir()) == []


async def test_stopping_cancels_what_runs() -> None:
    client = await started()
    stream = client.submit(fake_request("r", ENDLESS))
    await stream.next()
    await client.stop()
    assert (await read_on(stream)).reason == "cancelled"


async def test_the_end_of_reading_is_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    client = await started()
    stream = client.submit(fake_request("r", ENDLESS))
    await stream.next()

    def broken(message: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(client, "_receive", broken)
    with pytest.raises(EngineUnavailableError):
        await read_on(stream)
    assert "reading from the engine failed" in str(await client.wait_failed())
    await client.stop()  # though nobody takes what the engine has sent


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_that_reaches_all_processes_leaves_the_engine_running(
    signal_number: signal.Signals,
) -> None:
    client = await started()
    os.kill(client.pid, signal_number)
    request = fake_request("r", 5)
    assert (await client.submit(request).next()).token_ids
    assert client.is_alive
    await client.stop()


async def test_an_engine_that_does_not_stop_is_killed() -> None:
    client = await started(stop_timeout=0.1)
    os.kill(client.pid, signal.SIGSTOP)
    await client.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(client.pid, 0)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_dies_with_its_owner(signal_number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.support.engine_owner"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        engine_pid = int(owner.stdout.readline())
        owner.send_signal(signal_number)
        owner.stdout.read()  # its end: nobody holds the pipe any more, neither the owner nor the engine
    assert not Path(f"/proc/{engine_pid}/exe").exists()


async def test_many_starts_and_stops_leak_neither_descriptors_nor_directories(scratch: Path) -> None:
    counts = []
    for _ in range(4):
        client = await started()
        await client.submit(fake_request("r", 3)).next()
        await client.stop()
        counts.append(len(os.listdir("/dev/fd")))
    assert counts[-1] <= counts[0]
    assert list(scratch.iterdir()) == []


async def test_nobody_else_can_reach_the_socket(scratch: Path) -> None:
    client = await started()
    (directory,) = scratch.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    await client.stop()


async def test_what_a_killed_frontend_left_is_removed_at_the_next_start(scratch: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.support.engine_owner"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        owner.stdout.readline()
        other = await started()  # while the owner lives, its directory stays
        assert len(list(scratch.iterdir())) == 2
        owner.kill()
        owner.stdout.read()
    unlocked = scratch / "slipstream-unlocked"  # no lock of ours: not ours to remove
    unlocked.mkdir(mode=0o700)
    shared = scratch / "slipstream-shared"  # open to others: not ours either
    shared.mkdir(mode=0o700)
    (shared / "owner").touch()
    shared.chmod(0o750)
    client = await started()
    assert len(list(scratch.iterdir())) == 4
    await client.submit(fake_request("r", 3)).next()
    await other.submit(fake_request("r", 3)).next()
    await client.stop()
    await other.stop()
    assert sorted(scratch.iterdir()) == [shared, unlocked]


async def test_a_long_temporary_directory_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    client = await started()
    assert client.is_alive
    await client.stop()
    assert list(long.iterdir()) == []


async def test_a_configuration_that_the_engine_cannot_read_is_named() -> None:
    config = fake_config().model_copy(update={"device": 7})  # not validated, as of another version
    client = ProcessEngineClient(config, command=FAKE_ENGINE)
    with pytest.warns(UserWarning, match="serializer"), pytest.raises(ConfigError, match=r"device: .*got 7"):
        await client.start()


async def test_an_engine_that_hangs_is_killed_and_one_that_idles_is_not() -> None:
    client = await started(step_timeout=0.4)
    idle = await started(step_timeout=0.4)
    stream = client.submit(fake_request("r", ENDLESS, does="hang"))
    with pytest.raises(EngineUnavailableError):
        await read_on(stream)
    assert str(await client.wait_failed()) == "the engine was silent for 0.4 s and was killed"
    assert await read_on(idle.submit(fake_request("r", 3)))
    await client.stop()
    await idle.stop()

"""A minute of what `python -m tools.chaos` does for half an hour."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer
from tools.chaos.run import SERVER_ARGUMENTS, Settings, run
from tools.server_process import ServerProcess


async def test_under_cancels_deadlines_slow_readers_and_kills_every_request_ends_rightly(
    tmp_path: Path,
) -> None:
    model = make_tiny_tokenizer(make_tiny_checkpoint(tmp_path / "tiny", "llama"))
    settings = Settings(seconds=25.0, rate=8.0, kill_every=8.0, num_questions=40, seed=1)
    with ServerProcess(model, tmp_path / "server.log", arguments=SERVER_ARGUMENTS) as server:
        report = await run(server, settings)
    assert report.faults == []
    assert report.num_requests == settings.seconds * settings.rate
    assert report.outage_seconds, "the engine was never killed"
    for status in ("none: OK", "none: UNAVAILABLE ENGINE_UNAVAILABLE", "cancel: CANCELLED"):
        assert report.statuses.get(status), f"{status}: got none, so nothing was tested"

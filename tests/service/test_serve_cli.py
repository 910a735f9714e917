"""The command line: help without imports, flags that reach the configuration, exit statuses."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli import COMMANDS, make_app
from server.cli import serve as serve_module
from server.config import ServerConfig


def flags_of(help_text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z-]+", help_text))


def wide_help(*arguments: str) -> str:
    result = CliRunner().invoke(make_app("serve"), [*arguments, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.output


def test_every_field_of_the_configuration_is_a_flag_with_help() -> None:
    shown = flags_of(wide_help("serve"))
    for name, field in ServerConfig.model_fields.items():
        flag = "--" + name.replace("_", "-")
        assert flag in shown or flag.removesuffix("s") in shown
        assert field.description


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_of_a_help_is_cut_on_a_terminal_of_80_columns(command: str) -> None:
    result = CliRunner().invoke(make_app(command), [command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "…" not in result.output


def test_the_short_help_of_a_command_is_the_first_line_of_its_own() -> None:
    overview = wide_help()
    for name, (module, summary) in COMMANDS.items():
        assert summary in overview
        assert (getattr(import_module(module), name).__doc__ or "").startswith(summary)


def test_help_imports_neither_grpc_nor_torch() -> None:
    code = (
        "import sys; sys.argv = ['slipstream', '--help']\n"
        "from server.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'grpc', 'torch', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True)


def test_flags_reach_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerConfig] = []

    def remember(config: ServerConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(serve_module, "_run", remember)
    arguments = (
        "serve --model m --port 1234 --no-prefix-cache --speculator ngram,k=2 --speculator suffix "
        "--draft-policy first --allow-synthetic --synthetic-acceptance 0.5,0.25,0"
    )
    result = CliRunner().invoke(make_app("serve"), arguments.split())
    assert (result.exit_code, result.output) == (0, "")
    (config,) = seen
    assert (config.port, config.prefix_cache) == (1234, False)
    assert [speculator.method for speculator in config.speculators] == ["ngram", "suffix"]
    assert (config.draft_policy, config.synthetic_acceptance) == ("first", (0.5, 0.25, 0.0))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--port", "1"], 2, "error: model: got none, expected --model"),
        (["--model", "m", "--grace", "x"], 2, "error: grace: "),
        (["--model", "m", "--draft-policy", "best"], 2, "error: draft_policy: "),
        (["--model", "m", "--max-message-bytes", "2GiB"], 2, "error: max_message_bytes: "),
        (["--model", "m", "--keepalive-time", "inf"], 2, "error: keepalive_time: "),
        (["--model", "m", "--keepalive-timeout", "1e9"], 2, "error: keepalive_timeout: "),
        (["--model", "m", "--max-connection-age", "inf"], 2, "error: max_connection_age: "),
        (["--model", "m", "--synthetic-acceptance", "1"], 2, "error: synthetic_acceptance: "),
        (["--model", "m", "--config", "none.toml"], 2, "error: config: cannot read none.toml"),
    ],
)
def test_a_wrong_configuration_is_told_in_a_line(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(make_app("serve"), ["serve", *arguments])
    assert (result.exit_code, result.output.startswith(message)) == (status, True), result.output
    assert result.output.count("\n") == 1


def test_what_takes_long_to_import_is_there_before_the_event_loop_runs() -> None:
    """Inside it, Ctrl-C would only be noted, for a loop that has nothing to cancel yet."""
    code = (
        "import asyncio, sys\n"
        "from server.cli import main\n"
        "names = ('server.app', 'engine.client.process')\n"
        "asyncio.run = lambda run: (run.close(), print([name in sys.modules for name in names]), 0)[-1]\n"
        "sys.argv = ['slipstream', 'serve', '--model', 'm']\n"
        "main()\n"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[True, True]\n"), ended.stderr


def serve_in_a_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "serve", "--metrics-port", "0", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, **options)


def test_a_model_that_is_not_there_ends_the_server_with_status_1(tmp_path: Path) -> None:
    ended = serve_in_a_process("--model", str(tmp_path / "none"), "--port", "0")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"error: {tmp_path / 'none'}: no such file or directory"


def test_a_port_in_use_ends_the_server_with_status_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = serve_in_a_process("--model", str(tmp_path / "none"), "--port", str(port))
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"error: port: cannot listen on 127.0.0.1:{port}")

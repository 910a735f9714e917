"""`slipstream serve`. Its flags are the fields of ServerConfig: name, help and default are written there."""

from __future__ import annotations

import asyncio
import inspect
import typing
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from engine.errors import ConfigError, EngineError
from engine.garbage import spare_what_is_loaded
from server.config import ServerConfig, load_config
from server.logs import configure_logs

EXIT_FAILED = 1  # the model could not be loaded, or the engine died
EXIT_CONFIG = 2  # wrong flags, environment, file; a port in use


def serve(**flags: Any) -> None:
    """Serve a model over gRPC.

    Every option is also an environment variable (SLIPSTREAM_MAX_NUM_SEQS for
    --max-num-seqs) and a key of the file given with --config; options win over
    the environment, the environment over the file. --speculator is
    SLIPSTREAM_SPECULATORS='ngram,k=4;suffix' there, and a list `speculators`.

    SIGTERM drains: health turns NOT_SERVING, new requests are refused after
    --drain-delay, running streams finish within --grace. A second SIGTERM stops
    at once. An engine that dies is started again (--engine-restarts). Exit
    status: 0 stopped, 1 model or engine failed, 2 wrong configuration.

    Example: slipstream serve --model models/tiny-gemma4 --speculator ngram,k=4
    """
    file: Path | None = flags.pop("config")
    try:
        config = load_config({name: value for name, value in flags.items() if value not in (None, [])}, file)
        status = _run(config)
    except EngineError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED) from None
    raise typer.Exit(status)


def _run(config: ServerConfig) -> int:
    configure_logs(config.log_level, config.log_format)

    # They take a second: outside the event loop, where Ctrl-C ends it at once.
    from engine.client.process import ProcessEngineClient
    from server.app import App

    def make_client() -> ProcessEngineClient:
        return ProcessEngineClient(
            config.engine,
            slow_reader_timeout=config.slow_reader_timeout,
            step_timeout=config.step_timeout,
        )

    app = App(config, make_client(), restart_client=make_client)
    return asyncio.run(app.run(on_loaded=spare_what_is_loaded))


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """The flag of a field. Values travel as text; ServerConfig parses and checks them."""
    assert isinstance(field.json_schema_extra, dict)
    flag = "--" + name.replace("_", "-")
    kind: Any = str | None
    if field.annotation is bool:
        flag, kind = f"{flag}/--no-{flag.removeprefix('--')}", bool | None
    elif typing.get_origin(field.annotation) is tuple:
        flag, kind = flag.removesuffix("s"), list[str] | None  # may be repeated, so its name is singular
    option = typer.Option(
        flag,
        help=f"{field.description}{_default_text(field.default)}",
        show_default=False,
        metavar=None if kind == bool | None else "VALUE",
        # Two names in a row leave the others of a panel no room on a terminal of 80 columns.
        rich_help_panel="Switches" if kind == bool | None else str(field.json_schema_extra["group"]),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _default_text(default: Any) -> str:
    """Nothing where the description says what unset means."""
    if default in (None, "", ()):
        return ""
    if isinstance(default, bool):
        return f" Default: {'on' if default else 'off'}."
    human_readable = getattr(default, "human_readable", None)  # pydantic.ByteSize
    return f" Default: {human_readable() if human_readable else default}."


def _signature() -> inspect.Signature:
    config_option = typer.Option(help="A .toml or .yaml file with any of these options.")
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, config_option],
    )
    fields = (_parameter(name, field) for name, field in ServerConfig.model_fields.items())
    return inspect.Signature([config, *fields])


serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__annotations__ = {name: parameter.annotation for name, parameter in _signature().parameters.items()}

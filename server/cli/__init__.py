"""The `slipstream` command. Only the module of the command that runs is imported, so that --help is fast."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from server.version import slipstream_version

# name -> module with a function of that name, and the first line of its help
COMMANDS = {
    "serve": ("server.cli.serve", "Serve a model over gRPC."),
    "generate": ("server.cli.generate", "Generate text with a running server and show it as it comes."),
    "bench": ("server.cli.bench", "Measure a running server under load."),
    "info": (
        "server.cli.info",
        "Show the model, the KV cache, the draft methods and the load of a running server.",
    ),
}


def main() -> None:
    """Entry point of the console script and of `python -m server`."""
    make_app(next((argument for argument in sys.argv[1:] if argument in COMMANDS), None))(
        prog_name="slipstream"
    )


def make_app(invoked: str | None) -> typer.Typer:
    """The command line, with `invoked` as the one command that can run; the others are there for the help."""
    app = typer.Typer(
        name="slipstream",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # local variables of a traceback may hold prompts
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_global_options,
    )
    for name, (module, summary) in COMMANDS.items():
        if name == invoked:
            app.command(name)(getattr(import_module(module), name))
        else:
            app.command(name, help=summary)(_not_invoked)
    return app


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(slipstream_version())
        raise typer.Exit


def _global_options(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """A gRPC inference server with its own engine and speculative decoding.

    Start one with `slipstream serve --model PATH`, then ask it with
    `slipstream generate "Hello"`.
    """


def _not_invoked() -> None:
    raise AssertionError("make_app was told of another command")

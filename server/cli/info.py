"""`slipstream info`: what a running server serves, with what memory, and how busy it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableSequence
from typing import Annotated

import typer
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from server.cli.connection import open_channel, with_connection
from server.client import Connection
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc

_TIMEOUT = 10.0  # seconds for each call


@with_connection
def info(
    connection: Connection,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the model, the KV cache, the draft methods and the load of a running server.

    Example: slipstream info --address 127.0.0.1:50051
    """
    with open_channel(connection) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT)
        stub = pb_grpc.GenerationServiceStub(channel)
        model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=_TIMEOUT)
        server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=_TIMEOUT)
        load = stub.GetLoads(pb.GetLoadsRequest(), timeout=_TIMEOUT)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)
    if as_json:
        plain = {"health": status, "model": _plain(model), "server": _plain(server), "load": _plain(load)}
        typer.echo(json.dumps(plain, indent=2))
        return
    console = Console(markup=False, highlight=False)
    console.print(_table("Model", _model_rows(model)))
    console.print(_table("Server", [("health", status), *_server_rows(server)]))
    console.print(_table("Load", _load_rows(load)))


def _plain(message: Message) -> dict[str, object]:
    """Every field of a message, defaults included, 64-bit numbers as numbers."""
    values: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Mapping):
            value = dict(value)
        elif isinstance(value, MutableSequence):
            value = [_plain(item) if isinstance(item, Message) else item for item in value]
        values[field.name] = value
    return values


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _model_rows(model: pb.GetModelInfoResponse) -> list[tuple[str, str]]:
    return [
        ("model", model.model),
        ("architecture", model.architecture),
        ("parameters", f"{model.parameters / 1e6:,.1f} million"),
        ("weights", f"{_bytes(model.weight_bytes)} as {model.dtype} on {model.device}"),
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("context", f"{model.max_model_len:,} tokens"),
        ("end tokens", ", ".join(map(str, model.eos_token_ids)) or "none"),
        ("chat template", "yes" if model.has_chat_template else "no"),
    ]


def _server_rows(server: pb.GetServerInfoResponse) -> list[tuple[str, str]]:
    startup = ", ".join(
        f"{phase} {seconds:.1f} s" for phase, seconds in sorted(server.startup_seconds.items())
    )
    return [
        ("version", server.version),
        ("up", f"{server.uptime_seconds:,.0f} s"),
        ("start-up", startup or "unknown"),
        ("KV cache", f"{_bytes(server.kv_cache_bytes)}, {_bytes(server.kv_bytes_per_token)} per token"),
        ("KV block", f"{server.block_size} tokens"),
        *[(f"KV group {group.name}", _group_text(group, server.block_size)) for group in server.kv_groups],
        ("requests at once", f"{server.max_num_seqs:,}"),
        ("tokens per step", f"{server.max_num_batched_tokens:,}"),
        ("steps in flight", str(server.max_steps_in_flight)),
        ("numerics", server.numerics or "unknown"),
        ("speculators", ", ".join(server.speculators) or "none"),
        ("default speculator", server.default_speculator),
        ("synthetic acceptance", ", ".join(f"{rate:g}" for rate in server.synthetic_acceptance) or "off"),
        ("largest message", _bytes(server.max_message_bytes)),
    ]


def _group_text(group: pb.KVGroup, block_size: int) -> str:
    window = f", window {group.window:,}" if group.window else ""
    capacity = group.num_blocks * block_size
    return f"{group.num_blocks:,} blocks: {capacity:,} tokens of {_bytes(group.bytes_per_token)}{window}"


def _load_rows(load: pb.GetLoadsResponse) -> list[tuple[str, str]]:
    return [
        ("running requests", str(load.running_requests)),
        ("waiting requests", f"{load.waiting_requests} ({load.waiting_tokens:,} prompt tokens to compute)"),
        ("KV cache in use", f"{load.kv_cache_usage:.1%}, {load.free_blocks:,} blocks free"),
        ("draining", "yes" if load.draining else "no"),
    ]


def _bytes(count: int) -> str:
    """Binary units, three significant digits: 1.50 MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"

"""`slipstream bench`: drive a running server with load and report latencies and throughput."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from engine.errors import ConfigError
from server.bench.driver import RequestRecord, connect, run_closed_loop, run_open_loop
from server.bench.environment import current_environment
from server.bench.load import OutputPlan, complete, dataset_prompts, poisson_arrivals, random_prompts
from server.bench.render import print_report
from server.bench.schema import BenchResult, LoadReport, write_result
from server.bench.statistics import load_report
from server.cli.connection import EXIT_FAILED, failures_told, with_connection
from server.client import Connection
from server.pb.slipstream.v1 import generation_pb2 as pb

_DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True)
class LoadOptions:
    """The command line, checked."""

    connection: Connection
    concurrency: int | None  # closed loop
    rate: float | None  # open loop, requests a second
    num_requests: int
    num_warmup: int
    input_len: int
    dataset: Path | None
    output: OutputPlan


@with_connection
def bench(
    connection: Connection,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help=f"Streams at once. Default: {_DEFAULT_CONCURRENCY}.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, help="Requests a second at random (Poisson) times instead.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to measure.")] = 64,
    warmup: Annotated[int, typer.Option(min=0, help="Requests to send before, unmeasured.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each random prompt.")] = 128,
    output_len: Annotated[
        int, typer.Option(min=1, help="Tokens to generate (at most, with --dataset).")
    ] = 64,
    dataset: Annotated[
        Path | None, typer.Option(help="Prompts from a JSONL file: objects with `prompt` or `turns`.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    method: Annotated[
        str | None, typer.Option(help="Draft method, `auto` or `none`; else the server's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, arrival times and sampling.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> None:
    """Measure a running server under load.

    Keeps a number of streams busy (--concurrency), or sends at a given rate
    whatever the answers do (--rate). Prompts are random token ids and every
    answer has the full length, unless a prompt file is given. Exit status 1
    when no request completed.

    Example: slipstream bench --concurrency 16 --input-len 256 --output-len 64
    """
    if concurrency is not None and rate is not None:
        raise typer.BadParameter("give either --concurrency or --rate", param_hint="--rate")
    options = LoadOptions(
        connection=connection,
        concurrency=None if rate is not None else concurrency or _DEFAULT_CONCURRENCY,
        rate=rate,
        num_requests=num_requests,
        num_warmup=warmup,
        input_len=input_len,
        dataset=dataset,
        output=OutputPlan(
            output_len=output_len,
            ignore_eos=dataset is None,
            temperature=temperature,
            seed=seed,
            speculation_method=method,
        ),
    )
    report = _run(options)
    print_report(report, Console())
    if output is not None:
        write_result(_result(options, report), output)
    if report.num_completed == 0:
        raise typer.Exit(EXIT_FAILED)


def _run(options: LoadOptions) -> LoadReport:
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    failed: list[RequestRecord] = []
    with (
        failures_told(options.connection),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("requests", total=options.num_requests)

        def on_done(record: RequestRecord) -> None:
            progress.advance(task)
            if record.error:
                failed.append(record)

        report = asyncio.run(drive(options, on_done))
    if failed:
        typer.echo(f"first failure: {failed[0].error}: {failed[0].message}", err=True)
    return report


async def drive(options: LoadOptions, on_done: Callable[[RequestRecord], None]) -> LoadReport:
    """Warm up, send the load, report. Raises grpc.RpcError when the server cannot be asked what it is, ConfigError when
    the load cannot be sent.
    """
    num_streams = options.concurrency or options.num_requests
    async with connect(options.connection, num_streams) as stubs:
        model = await stubs[0].GetModelInfo(pb.GetModelInfoRequest())
        server = await stubs[0].GetServerInfo(pb.GetServerInfoRequest())
        requests = _requests(options, model.vocab_size)
        _check_lengths(options, model.max_model_len)
        warmup, measured = requests[: options.num_warmup], requests[options.num_warmup :]
        await run_closed_loop(stubs, warmup, 1, lambda record: None)
        if options.rate is None:
            records = await run_closed_loop(stubs, measured, num_streams, on_done)
        else:
            arrivals = poisson_arrivals(len(measured), options.rate, options.output.seed)
            records = await run_open_loop(stubs, measured, arrivals, on_done)
    rates = [round(rate, 6) for rate in server.synthetic_acceptance]  # float32 on the wire
    return load_report(model.model, records, synthetic_acceptance=rates)


def _check_lengths(options: LoadOptions, context: int) -> None:
    """Raises ConfigError where no answer could have its full length."""
    if options.dataset is None and options.input_len + options.output.output_len > context:
        raise ConfigError(
            f"--input-len, --output-len: got {options.input_len} and {options.output.output_len} tokens, "
            f"expected at most {context} in all: the context of the model"
        )


def _requests(options: LoadOptions, vocab_size: int) -> list[pb.GenerateRequest]:
    """Raises ConfigError."""
    num = options.num_warmup + options.num_requests
    if options.dataset is not None:
        prompts = dataset_prompts(options.dataset, num)
    else:
        prompts = random_prompts(num, options.input_len, vocab_size, options.output.seed)
    try:
        return complete(prompts, options.output)
    except ValueError as error:  # a number that the protocol has no room for
        raise ConfigError(f"the requests cannot be sent: {error}") from None


def _result(options: LoadOptions, report: LoadReport) -> BenchResult:
    return BenchResult(
        benchmark="load",
        environment=current_environment(),
        seed=options.output.seed,
        parameters={
            "address": options.connection.address,
            "concurrency": options.concurrency,
            "rate": options.rate,
            "num_requests": options.num_requests,
            "num_warmup": options.num_warmup,
            "input_len": None if options.dataset else options.input_len,
            "output_len": options.output.output_len,
            "dataset": options.dataset.name if options.dataset else None,
            "temperature": options.output.temperature,
            "method": options.output.speculation_method,
        },
        loads={"load": report},
    )

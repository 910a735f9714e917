"""`make demo`: the whole way once, seen from outside.

Fetches the model, starts the real server, streams one chat generation with a plain gRPC client, stops it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from server.cli.connection import describe
from server.cli.generate import describe_finish
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.fetch_model import FetchError, resolve
from tools.server_process import ServerProcess, ServerStartError, exit_on_sigterm

_PROMPT = "Explain in three sentences why the sky is blue."
_SPECULATOR = "ngram,k=3"  # needs no model of its own


@dataclass(frozen=True)
class Outcome:
    """What the client saw. Seconds."""

    finished: pb.Finished
    time_to_first_token: float
    total: float


def main() -> int:
    """Run the demo; exit status 0 when a generation was streamed to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="smollm2", help="a known model, a directory, a GGUF file or a hub id"
    )
    parser.add_argument("--prompt", default=_PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    console = Console(highlight=False)
    exit_on_sigterm()
    try:
        run(console, arguments.model, arguments.prompt, arguments.max_tokens)
    except (FetchError, ServerStartError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except grpc.RpcError as error:
        console.print(describe(error), style="red", markup=False)
        return 1
    return 0


def run(console: Console, model: str, prompt: str, max_tokens: int) -> None:
    """Raises FetchError, ServerStartError, grpc.RpcError."""
    path = resolve(model)
    console.print(f"model:  {path}")
    with tempfile.TemporaryDirectory(prefix="slipstream-demo-") as folder:
        arguments = ("--speculator", _SPECULATOR)
        server = ServerProcess(path, Path(folder) / "server.log", arguments=arguments)
        start = time.perf_counter()
        with console.status("starting the server, waiting for health SERVING ..."):
            server.start()
        try:
            console.print(f"server: {server.address}, SERVING after {time.perf_counter() - start:.1f} s")
            console.print(f"prompt: {prompt}\n", markup=False)
            with grpc.insecure_channel(server.address) as channel:
                outcome = stream(pb_grpc.GenerationServiceStub(channel), prompt, max_tokens)
            console.print(table(outcome))
        finally:
            status = server.stop()
        console.print(f"server stopped by SIGTERM, exit status {status}")


def stream(stub: pb_grpc.GenerationServiceStub, prompt: str, max_tokens: int) -> Outcome:
    """Ask greedily, write the text to stdout as it comes."""
    request = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=prompt)]),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=max_tokens),
    )
    start = time.perf_counter()
    first: float | None = None
    finished = pb.Finished()
    for response in stub.Generate(request):
        match response.WhichOneof("event"):
            case "delta":
                first = first or time.perf_counter()
                sys.stdout.write(response.delta.text)
                sys.stdout.flush()
            case "finished":
                finished = response.finished
    end = time.perf_counter()
    sys.stdout.write("\n\n")
    return Outcome(finished=finished, time_to_first_token=(first or end) - start, total=end - start)


def table(outcome: Outcome) -> Table:
    """Counts from the server, times as the client saw them."""
    usage, speculation = outcome.finished.usage, outcome.finished.speculation
    decode = outcome.total - outcome.time_to_first_token
    rate = (usage.completion_tokens - 1) / decode if usage.completion_tokens > 1 and decode > 0 else 0.0
    drafted = f"{speculation.acceptance_length:.2f} ({speculation.method})"
    rows = Table(show_header=False)
    rows.add_row("prompt tokens", str(usage.prompt_tokens))
    rows.add_row("output tokens", str(usage.completion_tokens))
    rows.add_row("time to first token", f"{outcome.time_to_first_token * 1e3:.0f} ms")
    rows.add_row("then", f"{rate:.1f} tokens/s")
    rows.add_row("acceptance length", drafted if speculation.verifications else "no speculation")
    rows.add_row("finish", describe_finish(outcome.finished))
    return rows


if __name__ == "__main__":
    sys.exit(main())

"""`make demo`: the whole way once, seen from outside, and what speculation brings on the way.

Starts the real server on a small model with its draft methods, streams one chat generation with a plain gRPC client,
then asks a few prompts without drafts and with each method in turns, and shows the rates. What is known of models here
is what drafts for which of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

_MODELS = Path(__file__).parent.parent / "models"
_LOOKUPS = ("ngram,k=3", "suffix,k=3")  # need no model of their own
_PLAIN = "none"
_PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that counts the vowels of a text.",
    "Tom has 12 apples, gives 5 to Anna and buys 9 more. How many apples does he have?",
)


@dataclass(frozen=True)
class Show:
    """A model, and what drafts for it, as `serve --speculator` takes it. `rounds`: how often all prompts are asked."""

    model: str
    speculators: tuple[str, ...]
    prompts: tuple[str, ...] = _PROMPTS
    rounds: int = 1
    arguments: tuple[str, ...] = ()  # more for `serve`

    @property
    def methods(self) -> list[str]:
        return [speculator.split(",", 1)[0] for speculator in self.speculators]


DEFAULT_MODEL = "tiny-gemma4"
_SHOWS = {
    "tiny-gemma4": Show(
        str(_MODELS / "tiny-gemma4"),
        (f"gemma4_mtp,model={_MODELS / 'tiny-gemma4-assistant'},positions=last_token,k=4", *_LOOKUPS),
        prompts=(
            "Explain in three sentences why the sky is blue.",
            "Write a story in two paragraphs that takes place on the moon. A turtle wins a race by being kind.",
            "A shop sells 34 coins a day. Each costs $3. How much money does it make in 5 days?",
        ),
        rounds=3,
        arguments=("--num-threads", "1"),  # its matrices are too small to be shared between cores
    ),
    "smollm2": Show("smollm2", (f"eagle3,model={_MODELS / 'smollm2-eagle3'},k=3", *_LOOKUPS)),
}


@dataclass(frozen=True)
class Outcome:
    """What the client saw of one generation. Seconds."""

    finished: pb.Finished
    time_to_first_token: float
    total: float

    @property
    def rate(self) -> float:
        """Tokens per second behind the first one; 0 when there are no others."""
        others, seconds = self.finished.usage.completion_tokens - 1, self.total - self.time_to_first_token
        return others / seconds if others > 0 and seconds > 0 else 0.0


def main() -> int:
    """Run the demo; exit status 0 when everything was streamed to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="tiny-gemma4 (in models/; default), smollm2 or another known model, a directory, a GGUF file, a hub id",
    )
    parser.add_argument(
        "--speculator",
        action="append",
        default=[],
        metavar="METHOD[,key=value...]",
        help="as for slipstream serve; may be given again; default: those that need no more than is here",
    )
    parser.add_argument("--prompt", help="for the generation that is shown")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    console = Console(highlight=False)
    exit_on_sigterm()
    try:
        show = choose_show(arguments.model, arguments.speculator)
        run(console, show, arguments.prompt, arguments.max_tokens)
    except (FetchError, ServerStartError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except grpc.RpcError as error:
        console.print(describe(error), style="red", markup=False)
        return 1
    return 0


def choose_show(model: str, speculators: Sequence[str]) -> Show:
    """`speculators`: what the user wants; none: lookups, and the drafter in models/ if it has one for this model."""
    show = _SHOWS.get(model, Show(model, _LOOKUPS))
    return replace(show, speculators=tuple(speculators)) if speculators else show


def run(console: Console, show: Show, prompt: str | None, max_tokens: int) -> None:
    """Raises FetchError, ServerStartError, grpc.RpcError."""
    path = resolve(show.model)
    console.print(f"model:  {path}")
    arguments = [part for speculator in show.speculators for part in ("--speculator", speculator)]
    with tempfile.TemporaryDirectory(prefix="slipstream-demo-") as folder:
        server = ServerProcess(
            path,
            Path(folder) / "server.log",
            arguments=(*arguments, *show.arguments, "--dtype", best_dtype()),
        )
        start = time.perf_counter()
        with console.status("starting the server, waiting for health SERVING ..."):
            server.start()
        try:
            console.print(f"server: {server.address}, SERVING after {time.perf_counter() - start:.1f} s")
            with grpc.insecure_channel(server.address) as channel:
                stub = pb_grpc.GenerationServiceStub(channel)
                shown = prompt or show.prompts[0]
                console.print(f"prompt: {shown}\n", markup=False)
                outcome = stream(stub, shown, max_tokens, show.methods[0], is_shown=True)
                console.print(details(outcome))
                with console.status("asking with and without drafts, in turns ..."):
                    prompts = show.prompts * show.rounds
                    outcomes = compare(stub, prompts, max_tokens, [_PLAIN, *show.methods])
            console.print(comparison(outcomes))
        finally:
            status = server.stop()
        console.print(f"server stopped by SIGTERM, exit status {status}")


def best_dtype(cpu_info: Path = Path("/proc/cpuinfo"), gpu: Path = Path("/dev/nvidiactl")) -> str:
    """On a CPU that multiplies bfloat16, bfloat16: there several rows cost hardly more than one, which drafts need."""
    if gpu.exists() or not cpu_info.exists():
        return "auto"
    flags = cpu_info.read_text()
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def stream(
    stub: pb_grpc.GenerationServiceStub, prompt: str, max_tokens: int, method: str, *, is_shown: bool
) -> Outcome:
    """Ask greedily; if `is_shown`, write the text to stdout as it comes. Nothing is learned from one answer for the
    next: the same prompt comes again with the next method."""
    request = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=prompt)]),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=max_tokens),
        speculation=pb.SpeculationParams(method=method),
        cache_salt=uuid.uuid4().hex,
    )
    start = time.perf_counter()
    first: float | None = None
    finished = pb.Finished()
    for response in stub.Generate(request):
        match response.WhichOneof("event"):
            case "delta":
                first = first or time.perf_counter()
                if is_shown:
                    sys.stdout.write(response.delta.text)
                    sys.stdout.flush()
            case "finished":
                finished = response.finished
    end = time.perf_counter()
    if is_shown:
        sys.stdout.write("\n\n")
    return Outcome(finished=finished, time_to_first_token=(first or end) - start, total=end - start)


def compare(
    stub: pb_grpc.GenerationServiceStub, prompts: Sequence[str], max_tokens: int, methods: Sequence[str]
) -> dict[str, list[Outcome]]:
    """Every prompt with every method, in turning order: what else the machine does hits all of them alike."""
    outcomes: dict[str, list[Outcome]] = {method: [] for method in methods}
    for index, prompt in enumerate(prompts):
        first = index % len(methods)
        for method in (*methods[first:], *methods[:first]):
            outcomes[method].append(stream(stub, prompt, max_tokens, method, is_shown=False))
    return outcomes


def details(outcome: Outcome) -> Table:
    """Counts from the server, times as the client saw them."""
    usage, speculation = outcome.finished.usage, outcome.finished.speculation
    drafted = f"{speculation.acceptance_length:.2f} ({speculation.method})"
    rows = Table(show_header=False)
    rows.add_row("prompt tokens", str(usage.prompt_tokens))
    rows.add_row("output tokens", str(usage.completion_tokens))
    rows.add_row("time to first token", f"{outcome.time_to_first_token * 1e3:.0f} ms")
    rows.add_row("then", f"{outcome.rate:.1f} tokens/s")
    rows.add_row("acceptance length", drafted if speculation.verifications else "no speculation")
    rows.add_row("finish", describe_finish(outcome.finished))
    return rows


def comparison(outcomes: dict[str, list[Outcome]]) -> Table:
    """Medians over the prompts; the rate against plain decoding is that of each prompt."""
    plain = [outcome.rate for outcome in outcomes[_PLAIN]]
    table = Table("draft method", "tokens/s", "against plain", "acceptance length")
    for method, asked in outcomes.items():
        rates = [outcome.rate for outcome in asked]
        ratios = [rate / base for rate, base in zip(rates, plain, strict=True) if base]
        table.add_row(
            "plain" if method == _PLAIN else method,
            f"{statistics.median(rates):.1f}",
            f"{statistics.median(ratios):.2f}x" if ratios else "-",
            f"{length:.2f}" if (length := acceptance_length(asked)) else "-",
        )
    return table


def acceptance_length(outcomes: Sequence[Outcome]) -> float:
    """Tokens per verification, over all of them; 0 without any."""
    stats = [outcome.finished.speculation for outcome in outcomes]
    verifications = sum(item.verifications for item in stats)
    return sum(item.acceptance_length * item.verifications for item in stats) / max(verifications, 1)


if __name__ == "__main__":
    sys.exit(main())

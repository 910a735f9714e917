"""The service on a GPU through gRPC: what a client sees at 1, 8 and 64 streams, with dummy weights of a geometry.

python -m benchmarks.gpu_service [--geometry smollm2-135m] [--streams 1 8 64] [--output FILE]

A server in processes of its own (frontend and engine), and the load generator of `slipstream bench` in this one:
128 tokens in, 256 out, greedy, end tokens ignored. Rows are of the service: prompts, tokens and messages cross gRPC,
and tokens become text, by a tokenizer made for the purpose. Figures of the engine alone are those of `gpu_steps`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_engine import Setup, write_checkpoint, write_report
from server.bench.load import OutputPlan
from server.bench.schema import LoadReport
from server.cli.bench import LoadOptions, drive
from server.client import Connection
from tools.server_process import ServerProcess, exit_on_sigterm


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Byte-level, as of most models: bytes first, then words of one to eight letters. Nothing is ever merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = random.Random(0)
    words: dict[str, int] = {character: index for index, character in enumerate(alphabet)}
    while len(words) < vocab_size:
        word = "Ġ" + "".join(letters.choices("etaoinshrdlu", k=letters.randint(1, 8)))
        words.setdefault(word, len(words))
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def measure(
    setup: Setup, streams: list[int], *, output_len: int, num_runs: int, deadline: float
) -> list[dict[str, Any]]:
    """A row for each number of streams."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(setup, folder)
        write_tokenizer(folder, setup.config["vocab_size"])
        started = time.perf_counter()
        log = folder / "log"
        with _shown_on_failure(log), ServerProcess(folder, log, arguments=_arguments(setup)) as server:
            seconds = time.perf_counter() - started
            print(f"{setup.describe()}: serving after {seconds:.1f} s", flush=True)
            rows = []
            for count in streams:
                if time.monotonic() > deadline:
                    break
                _load(server.address, count, min(output_len, 32), seed=1000 + count)  # asks for its graphs
                time.sleep(2.0)  # they are captured while nothing else is to be done
                reports = [
                    _load(server.address, count, output_len, seed=10 * count + run) for run in range(num_runs)
                ]
                rows.append(
                    {
                        **setup.describe(),
                        "streams": count,
                        "prompt_tokens": 128,
                        "output_tokens": output_len,
                        "runs": num_runs,
                        **_figures(reports),
                        "serving_seconds": seconds,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


@contextmanager
def _shown_on_failure(log: Path) -> Iterator[None]:
    """The end of the server's log: it lies in a folder that is gone afterwards."""
    try:
        yield
    except Exception:
        if log.exists():
            print(log.read_text()[-4000:], flush=True)
        raise


def _arguments(setup: Setup) -> list[str]:
    words = ["--load-format", "dummy", "--device", setup.device, "--attention-backend", setup.backend]
    words += ["--max-num-seqs", "256", "--max-num-batched-tokens", "16384", "--no-prefix-cache"]
    if setup.kv_cache_bytes is not None:
        words += ["--kv-cache-memory", str(setup.kv_cache_bytes)]
    return words


def _load(address: str, streams: int, output_len: int, seed: int) -> LoadReport:
    """Every stream sends one request."""
    options = LoadOptions(
        connection=Connection(address),
        concurrency=streams,
        rate=None,
        num_requests=streams,
        num_warmup=0,
        input_len=128,
        dataset=None,
        output=OutputPlan(output_len=output_len, ignore_eos=True, temperature=0.0, seed=seed),
    )
    report = asyncio.run(drive(options, lambda record: None))
    if report.num_completed != streams:
        raise RuntimeError(f"got {report.num_completed} answers, expected {streams}: {report.errors}")
    return report


def _figures(reports: list[LoadReport]) -> dict[str, float]:
    """Of the median run by time per output token."""
    by_tpot = sorted(reports, key=lambda report: report.time_per_output_token.p50)
    report = by_tpot[len(by_tpot) // 2]
    return {
        "tpot_ms": report.time_per_output_token.p50 * 1e3,
        "spread": by_tpot[-1].time_per_output_token.p50 / by_tpot[0].time_per_output_token.p50 - 1,
        "ttft_ms": report.time_to_first_token.p50 * 1e3,
        "inter_token_p99_ms": report.inter_token_latency.p99 * 1e3,
        "tokens_per_second": report.tokens_per_second,
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--geometry", nargs="+", default=["smollm2-135m", "llama-3.1-8b"], choices=list(GEOMETRIES)
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--num-layers", type=int, help="fewer than the geometry has: a rehearsal")
    parser.add_argument("--kv-cache-bytes", type=int, help="default: the engine's share of the memory")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    exit_on_sigterm()
    deadline = time.monotonic() + arguments.time_limit
    rows: list[dict[str, Any]] = []
    for geometry in arguments.geometry:
        if time.monotonic() > deadline:
            print(f"no time is left for {geometry}", flush=True)
            continue
        setup = Setup(
            geometry,
            device=arguments.device,
            num_layers=arguments.num_layers,
            kv_cache_bytes=arguments.kv_cache_bytes,
            weights="normal",  # what a server's dummy weights are
        )
        try:
            rows += measure(
                setup,
                arguments.streams,
                output_len=arguments.output_tokens,
                num_runs=arguments.runs,
                deadline=deadline,
            )
        except Exception as error:  # whatever it is: the other geometry is worth its own attempt
            print(f"{geometry}: {error}", flush=True)
            rows.append({**setup.describe(), "error": f"{type(error).__name__}: {error}"[:300]})
        if arguments.output:
            write_report("gpu_service", arguments.output, rows, arguments.device)


if __name__ == "__main__":
    main()

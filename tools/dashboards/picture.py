"""`python -m tools.dashboards.picture`: the Speculation dashboard over a real run, as a PNG for the documentation.

Serves a model with draft methods that need none of their own, lets a real Prometheus watch some minutes of load, runs
every query of the dashboard, and draws the answers with Grafana's own components in a headless Chromium (heatmaps,
which are not among them, with code of page/). Needs prometheus, chromium and npm; what npm installs (600 MB) stays in
the cache folder. Not part of the tests.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.dashboards.__main__ import FOLDER
from tools.dashboards.prometheus import PrometheusError, PrometheusProcess
from tools.fetch_model import FetchError, models_folder, resolve
from tools.server_process import ServerProcess, ServerStartError, exit_on_sigterm

PAGE = Path(__file__).parent / "page"
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "speculation-dashboard.png"
WIDTH, ROW_HEIGHT = 1600, 38  # pixels, as in page.jsx
WINDOW_FRAME = 90  # pixels of the window's height in which Chromium shows no page
STEP_SECONDS = 2.0
RATE_WINDOW = "15s"  # what Grafana makes of a scrape interval of 1 s, and more for a smooth line
CONCURRENCY = 2
SPECULATORS = ("ngram,k=4", "suffix,k=4")
METHODS = ("ngram", "suffix", "auto", "ngram", "suffix", "none")
# Text that repeats itself, as code, tables and quotations do: where such drafts are worth their while.
PROMPTS = (
    "Count: one, two, three, four, five. Count: one, two, three, four, five. Count: one, two,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "| name | age |\n| --- | --- |\n| Ann | 30 |\n| Bob | 31 |\n| Cid | 32 |\n",
    "Once upon a time there was a small engine that wanted to be fast.",
)


def main() -> int:
    """Run the command; exit status 1 with one line when something is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a known model, a directory or a GGUF file")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the run")
    parser.add_argument("--output", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    exit_on_sigterm()
    try:
        data = observe(
            json.loads((FOLDER / "speculation.json").read_text()), arguments.model, arguments.seconds
        )
        draw(data, build_page(), arguments.output)
    except (FetchError, ServerStartError, PrometheusError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{error}\n{error.output}", file=sys.stderr)
        return 1
    print(arguments.output)
    return 0


def observe(dashboard: dict[str, Any], model: str, seconds: float) -> dict[str, Any]:
    """What page.jsx reads: the dashboard, the answers to its queries by panel id, the time that they are of."""
    speculators = itertools.chain.from_iterable(("--speculator", text) for text in SPECULATORS)
    with tempfile.TemporaryDirectory(prefix="slipstream-picture-") as name:
        folder = Path(name)
        with (
            ServerProcess(resolve(model), folder / "server.log", arguments=tuple(speculators)) as server,
            PrometheusProcess(folder, [f"127.0.0.1:{server.metrics_port}"], interval="1s") as prometheus,
        ):
            start = time.time()
            generate_for(seconds, server.address)
            end = time.time()
            results = {
                panel["id"]: [
                    prometheus.query_range(replace_variables(target["expr"]), start, end, STEP_SECONDS)
                    for target in panel["targets"]
                ]
                for panel in dashboard["panels"]
                if panel["type"] != "row"
            }
    return {"dashboard": dashboard, "results": results, "from": start, "to": end}


def replace_variables(expression: str) -> str:
    """All of everything."""
    expression = expression.replace("$__rate_interval", RATE_WINDOW)
    for name in ("namespace", "model", "method", "instance"):
        expression = expression.replace(f"${name}", ".*")
    return expression


def generate_for(seconds: float, address: str) -> None:
    """Keep CONCURRENCY streams open, method after method and prompt after prompt."""
    deadline = time.monotonic() + seconds
    pairs = itertools.cycle(itertools.product(PROMPTS, METHODS))
    lock = threading.Lock()

    def worker(stub: pb_grpc.GenerationServiceStub) -> None:
        while time.monotonic() < deadline:
            with lock:
                prompt, method = next(pairs)
            request = pb.GenerateRequest(
                text=prompt,
                sampling=pb.SamplingParams(temperature=0.0),
                stopping=pb.StoppingParams(max_tokens=64, ignore_eos=True),
                speculation=pb.SpeculationParams(method=method),
            )
            for _ in stub.Generate(request):
                pass

    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(CONCURRENCY) as pool:
        stub = pb_grpc.GenerationServiceStub(channel)
        for future in [pool.submit(worker, stub) for _ in range(CONCURRENCY)]:
            future.result()


def build_page() -> Path:
    """Build page/ in the cache folder, which keeps npm's packages, and return the folder of the result."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is missing (on Debian and Ubuntu: apt install npm)")
    digest = hashlib.sha256((PAGE / "package.json").read_bytes()).hexdigest()[:16]
    folder = models_folder().parent / f"dashboard-page-{digest}"
    shutil.copytree(PAGE, folder, dirs_exist_ok=True)
    quiet = functools.partial(
        subprocess.run, cwd=folder, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if not (folder / "node_modules" / ".package-lock.json").exists():
        quiet([npm, "install", "--no-audit", "--no-fund"])
    quiet([npm, "run", "build"])
    return folder / "dist"


def draw(data: dict[str, Any], page: Path, output: Path) -> None:
    """Let Chromium show the page with the data, and write what it shows."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise FileNotFoundError("chromium is missing (on Debian and Ubuntu: apt install chromium)")
    (page / "data.json").write_text(json.dumps(data), encoding="utf-8")
    boxes = [panel["gridPos"] for panel in data["dashboard"]["panels"]]
    height = max(box["y"] + box["h"] for box in boxes) * ROW_HEIGHT + WINDOW_FRAME
    output.parent.mkdir(parents=True, exist_ok=True)
    with serve(page) as url, tempfile.TemporaryDirectory(prefix="slipstream-chromium-") as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-sync"]
        options += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]
        options += [
            f"--window-size={WIDTH},{height}",
            "--virtual-time-budget=10000",
            f"--screenshot={output}",
        ]
        subprocess.run(
            [chromium, *options, url], check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The folder over HTTP on this machine."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    sys.exit(main())

"""An engine in this process with dummy weights of a stated geometry, and runs of random greedy requests on it.

What the GPU benchmarks share. The settings are the peer's: 256 requests, 16,384 tokens a step, no prefix cache.
Drafters have dummy weights too, so acceptance is synthetic: the first two drafts of a step are accepted.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.geometries import DRAFTERS, GEOMETRIES, with_layers
from engine.assembly import EngineParts, assemble, resolve_device
from engine.config import EngineConfig, engine_config
from engine.core import EngineCore
from engine.garbage import spare_what_is_loaded
from engine.messages import AddRequest, LoadProgress
from engine.models.loader import load_model
from engine.params import SamplingParams
from engine.stats import SpecObservation
from server.bench.environment import current_environment
from server.bench.schema import BenchResult, write_result

NUM_ACCEPTED = 2  # drafts of a step, at most
MAX_CAPTURES = 6  # before a measurement; those that the run before asked for come first
METHODS = ("none", "ngram", "eagle3", "gemma4_mtp", "mtp")
NUM_WORDS = 64  # token ids that prompts are made of


@dataclass(frozen=True)
class Setup:
    """What an engine is made of. Fields that are None leave the engine's default."""

    geometry: str
    speculator: str = "none"
    num_drafts: int = 0
    device: str = "cuda"
    backend: str = "auto"
    graphs: str = "auto"
    numerics: str = "auto"
    weights: str = "uniform"  # as the peer's dummy weights
    num_layers: int | None = None  # fewer than the geometry has, for a rehearsal
    kv_cache_bytes: int | None = None

    @property
    def is_possible(self) -> bool:
        return self.speculator in ("none", "ngram") or (self.geometry, self.speculator) in DRAFTERS

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the target."""
        return with_layers(GEOMETRIES[self.geometry], self.num_layers)

    def describe(self) -> dict[str, Any]:
        """The start of a row: fields at their defaults are left out."""
        always = ("geometry", "speculator", "num_drafts")
        return {
            item.name: value
            for item in fields(self)
            if (value := asdict(self)[item.name]) != item.default or item.name in always
        }


def write_checkpoint(setup: Setup, folder: Path) -> None:
    """config.json of the target and, in `drafter`, of a drafter with weights of its own."""
    config = {"torch_dtype": "bfloat16", "eos_token_id": 2, **setup.config}
    (folder / "config.json").write_text(json.dumps(config))
    drafter = DRAFTERS.get((setup.geometry, setup.speculator))
    if drafter is not None:
        (folder / "drafter").mkdir()
        (folder / "drafter" / "config.json").write_text(json.dumps(drafter))


def make_core(setup: Setup) -> EngineCore:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(setup, folder)
        config = engine_config(
            model={"model": str(folder), "load_format": "dummy", "dummy_weights": setup.weights},
            device=setup.device,
            attention_backend=setup.backend,
            cuda_graphs=setup.graphs,
            numerics=setup.numerics,
            scheduler={"max_num_seqs": 256, "max_num_batched_tokens": 16384, "max_prefill_stall": None},
            cache={"enable_prefix_cache": False, "kv_cache_bytes": setup.kv_cache_bytes},
            **_speculation(setup, folder),
        )
        if setup.speculator == "ngram":
            return EngineCore(config, build=_build_with_few_words)
        return EngineCore(config)


def _build_with_few_words(config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> EngineParts:
    """A target that says nothing but the tokens of the prompts, so that they are found there. Times are the same."""
    device = resolve_device(config.device)
    loaded = load_model(config.model, device=device, on_progress=on_progress)
    for parameter in loaded.model.parameters():
        if len(parameter) == loaded.model.vocab_size:
            parameter[NUM_WORDS:] = 0.0
    return assemble(config, loaded, device=device)


def _speculation(setup: Setup, folder: Path) -> dict[str, Any]:
    if setup.speculator == "none":
        return {}
    speculator: dict[str, Any] = {"method": setup.speculator, "k": setup.num_drafts}
    if (folder / "drafter").exists():
        speculator["model"] = str(folder / "drafter")
    if setup.speculator == "ngram":
        speculator["options"] = {"min_n": "1"}
    return {
        "speculators": (speculator,),
        "draft_policy": "first",
        "allow_synthetic": True,
        "synthetic_acceptance": [float(index < NUM_ACCEPTED) for index in range(setup.num_drafts)],
    }


def start(setup: Setup) -> tuple[EngineCore, float]:
    """The engine, and the seconds that it took to be ready."""
    started = time.perf_counter()
    core = make_core(setup)
    spare_what_is_loaded()  # as an engine process does
    seconds = time.perf_counter() - started
    phases = ", ".join(f"{name} {value:.1f}" for name, value in core.model_info.startup_seconds.items())
    print(f"{setup.describe()}: ready after {seconds:.1f} s ({phases})", flush=True)
    return core, seconds


def free_memory() -> None:
    """Of engines that were started and closed."""
    gc.unfreeze()  # what was spared when they started
    gc.collect()  # their parts refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def add_requests(core: EngineCore, batch: int, seed: int, *, prompt_len: int, output_len: int) -> None:
    """Random prompts of few words, other ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = torch.randint(NUM_WORDS, (prompt_len,), generator=generator).tolist()
        core.handle(AddRequest(request_id=f"{seed}-{index}", prompt_token_ids=prompt, params=params))


@dataclass
class Run:
    """What a batch of requests got, and when."""

    arrivals: dict[str, list[float]] = field(default_factory=dict)  # request -> times of its outputs, seconds
    observations: list[SpecObservation] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)  # by kind of graph

    def tpot_ms(self, output_len: int) -> float:
        """Time per output token after the first one: median over the requests."""
        gaps = ((times[-1] - times[0]) / max(output_len - 1, 1) for times in self.arrivals.values())
        return statistics.median(gaps) * 1e3

    def step_ms(self) -> float:
        """Time between two outputs of a request: median over the requests."""
        gaps = ((times[-1] - times[0]) / max(len(times) - 1, 1) for times in self.arrivals.values())
        return statistics.median(gaps) * 1e3

    def acceptance_length(self, method: str) -> float:
        """Tokens of a verification. Raises RuntimeError when nothing was drafted: what ran was plain decoding."""
        emitted = [item.num_emitted for item in self.observations if item.method == method]
        if not emitted:
            raise RuntimeError(f"{method}: got no verification of its drafts, expected some in every run")
        return statistics.mean(emitted)

    @property
    def replayed_share(self) -> float:
        """Of the steps, those whose target was a graph's replay."""
        return self.steps["full"] / max(self.steps.total(), 1)


def run_batch(core: EngineCore, batch: int, seed: int, *, prompt_len: int, output_len: int) -> Run:
    add_requests(core, batch, seed, prompt_len=prompt_len, output_len=output_len)
    run = Run()
    while core.has_work:
        message = core.step()
        now = time.perf_counter()
        if message is None:
            continue
        if message.step is not None:
            run.steps[message.step.graph_kind] += 1
        for output in message.outputs:
            if output.token_ids:
                run.arrivals.setdefault(output.request_id, []).append(now)
            run.observations += output.spec
    return run


def capture_asked(core: EngineCore) -> list[float]:
    """Capture what the runs before asked for, as far as MAX_CAPTURES reach. Milliseconds of each."""
    times = []
    for _ in range(MAX_CAPTURES):
        started = time.perf_counter()
        if not core.prepare():
            break
        times.append((time.perf_counter() - started) * 1e3)
    return times


def write_report(benchmark: str, path: Path, rows: Iterable[dict[str, Any]], device: str) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else device
    environment = current_environment(device=name, num_threads=None)
    write_result(BenchResult(benchmark=benchmark, environment=environment, seed=0, rows=list(rows)), path)

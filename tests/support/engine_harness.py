"""Drives an EngineCore without a frontend and collects what each request got."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from engine.assembly import assemble
from engine.config import EngineConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.executor import Executor, StepHandle
from engine.messages import (
    AbortRequests,
    AddRequest,
    FinishInfo,
    PositionLogprobs,
    RequestOutput,
    StepMessage,
)
from engine.models.loader import LoadedModel
from engine.params import Constraint, SamplingParams, SpeculationParams
from engine.spec_decode.speculator import BaseSpeculator
from engine.stats import EngineStats, SpecObservation
from engine.step import HostInputs, StepOutput, StepPlan
from tests.support.scripted_target import ScriptedTarget


class DeferredExecutor(Executor):
    """Runs a step only when it is collected, from a copy of the plan that went through the wire encoding."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._inputs: dict[int, HostInputs] = {}  # by step

    def launch(self, plan: StepPlan) -> StepHandle:
        return StepHandle(msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan))

    def provide(self, handle: StepHandle, inputs: HostInputs) -> None:
        self._inputs[handle.plan.step] = msgspec.msgpack.decode(
            msgspec.msgpack.encode(inputs), type=HostInputs
        )

    def collect(self, handle: StepHandle) -> StepOutput:
        inner = self._inner.launch(handle.plan)
        if handle.plan.needs_host_inputs:
            self._inner.provide(inner, self._inputs.pop(handle.plan.step))
        output = self._inner.collect(inner)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput)


@dataclass
class Result:
    """Everything that one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish: FinishInfo | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    spec: list[SpecObservation] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        assert self.finish is None, "output after the end"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish = output.finish
        self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions = output.num_preemptions
        self.spec += output.spec


class Harness:
    """An engine core and the results of its requests."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.results: dict[str, Result] = {}
        self.num_steps = 0
        self.stats = EngineStats()

    def add(self, request: AddRequest) -> None:
        self.results[request.request_id] = Result()
        self.core.handle(request)

    def abort(self, *request_ids: str) -> None:
        self._take(self.core.handle(AbortRequests(list(request_ids))))

    def step(self) -> None:
        self.num_steps += 1
        self._take(self.core.step())

    def run(self, requests: Sequence[AddRequest] = ()) -> dict[str, Result]:
        """Add the requests at once and go on until nothing is left; every block must have come back."""
        for request in requests:
            self.add(request)
        while self.core.has_work:
            self.step()
            assert self.num_steps < 100_000, "the engine does not come to an end"
        assert all(result.finish is not None for result in self.results.values())
        assert self.stats.num_used_blocks == 0, "blocks of finished requests did not come back"
        return self.results

    def _take(self, message: StepMessage | None) -> None:
        if message is None:
            return
        self.stats = message.stats
        for output in message.outputs:
            self.results[output.request_id].add(output)


def make_core(
    loaded: LoadedModel,
    *,
    speculators: Mapping[str, BaseSpeculator] | None = None,
    k: int = 0,
    deferred: bool = False,
    config: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
) -> EngineCore:
    """A core around a loaded model; `k` and `speculators` load test methods under their names."""
    configs = tuple(SpeculatorConfig(method=name, k=max(k, 1)) for name in (speculators or {}))
    settings = engine_config(
        model={"model": "test"},
        device="cpu",
        speculators=configs,
        draft_policy="first",
        scheduler={"max_prefill_stall": None, "check_invariants": True, **(scheduler or {})},
        cache={"block_size": 16, "num_blocks": 256, **(cache or {})},
        **(config or {}),
    )

    def wrap(executor: Executor) -> Executor:
        return DeferredExecutor(executor) if deferred else executor

    def build(config: EngineConfig, on_progress: Callable[..., None]) -> Any:
        return assemble(
            config, loaded, device=torch.device("cpu"), speculators=speculators, wrap_executor=wrap
        )

    return EngineCore(settings, build=build)


def scripted_model(
    vocab_size: int = 64, max_len: int = 512, eos: tuple[int, ...] = (2,), **kwargs: Any
) -> LoadedModel:
    """The scripted target as the loader would hand it over."""
    model = ScriptedTarget(vocab_size, max_len, **kwargs)
    return LoadedModel(
        model=model,
        raw_config={},
        architecture="ScriptedTarget",
        dtype=torch.float64,
        eos_token_ids=eos,
        num_parameters=0,
        weight_bytes=0,
    )


def request(
    request_id: str,
    prompt: Sequence[int],
    *,
    method: str | None = None,
    k: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
    constraint: Constraint | None = None,
    **params: Any,
) -> AddRequest:
    """An AddRequest; sampling is greedy and 16 tokens long unless said otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **params})
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=sampling,
        speculation=SpeculationParams(method=method, num_speculative_tokens=k),
        constraint=constraint,
        priority=priority,
        cache_salt=cache_salt,
    )

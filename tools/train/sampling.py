"""Samples answers from a model through the engine itself, many at once, until the time is over.

The core is driven directly: no frontend, no event loop. New requests are taken in waves, because a step that also
computes prompts cannot be replayed as a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.tokenizer_files import load_hf_tokenizer
from engine.config import EngineConfig, ModelConfig, engine_config
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.messages import AddRequest, RequestOutput
from engine.params import SamplingParams
from tools.train.prompts import Prompt
from tools.train.samples import Sample, SampleWriter

Render = Callable[[Any, Prompt], str]  # of a tokenizer and a prompt: the text that the model goes on with
_REPORT_SECONDS = 10.0
_MOST_TOO_LONG = 1000  # prompts one behind the other
_TOP_K = 64  # bounds what is sorted of each row; as in Gemma's own defaults


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """What is sampled. `temperatures`: each with its share of the requests; `max_tokens`: of the requests in turn."""

    max_tokens: Sequence[int]
    min_tokens: int = 0
    temperatures: Sequence[tuple[float, float]] = ((0.0, 0.25), (0.8, 0.75))
    top_p: float = 0.95
    num_seqs: int = 256
    refill_below: float = 0.7  # of num_seqs: then new requests come in
    kv_cache_bytes: int | None = None
    max_model_len: int = 1280
    device: str = "auto"
    dtype: str = "auto"
    tokenizer: str | None = None
    seed: int = 0


@dataclass
class _Open:
    prompt: Prompt
    prompt_ids: list[int]
    temperature: float
    answer_ids: list[int] = field(default_factory=list)


@dataclass
class SamplingReport:
    num_samples: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


def sampling_engine(model: str, plan: SamplingPlan) -> EngineConfig:
    """An engine for throughput: whole prompts at once, no prefix cache."""
    return engine_config(
        model={"model": model, "dtype": plan.dtype, "tokenizer": plan.tokenizer},
        device=plan.device,
        max_model_len=plan.max_model_len,
        cache={"enable_prefix_cache": False, "kv_cache_bytes": plan.kv_cache_bytes},
        scheduler={
            "max_num_seqs": plan.num_seqs,
            "max_num_batched_tokens": 8 * plan.max_model_len,
            "max_prefill_stall": None,
            "max_waiting": 2 * plan.num_seqs,
        },
    )


class AnswerSampler:
    """Keeps the engine full of requests and turns what comes back into samples."""

    def __init__(
        self, core: EngineCore, tokenizer: Any, render: Render, plan: SamplingPlan, max_model_len: int
    ) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._render = render
        self._plan = plan
        self._max_model_len = max_model_len
        if max(plan.max_tokens) >= max_model_len:
            raise ConfigError(
                f"max_tokens: got {max(plan.max_tokens)}, expected fewer than the model's {max_model_len} tokens"
            )
        self._open: dict[str, _Open] = {}
        self._num_asked = 0

    def run(
        self, prompts: Iterator[Prompt], writer: SampleWriter, seconds: float, limit: int | None
    ) -> SamplingReport:
        """Until `seconds` are over or `limit` answers are there; unfinished answers are kept as "cut"."""
        report = SamplingReport()
        start = last_said = time.monotonic()
        while (now := time.monotonic()) < start + seconds and (limit is None or report.num_samples < limit):
            if len(self._open) < self._plan.num_seqs * self._plan.refill_below:
                self._refill(prompts, None if limit is None else limit - report.num_samples)
            message = self._core.step()
            for output in message.outputs if message is not None else ():
                self._take(output, writer, report)
            if now > last_said + _REPORT_SECONDS:
                last_said = now
                print(
                    f"{report.num_samples} answers, {report.num_tokens / (now - start):.0f} tokens/s",
                    flush=True,
                )
        self._core.close()
        for item in self._open.values():
            self._keep(item, "cut", writer, report)
        writer.flush()
        report.seconds = time.monotonic() - start
        return report

    def _refill(self, prompts: Iterator[Prompt], limit: int | None) -> None:
        """Prompts that leave no room for their answer are left out. Raises ConfigError where all of them would be."""
        room = self._plan.num_seqs if limit is None else min(self._plan.num_seqs, limit)
        num_too_long = 0
        while len(self._open) < room:
            prompt = next(prompts)
            text = self._render(self._tokenizer, prompt)
            prompt_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            params = self._params()
            if len(prompt_ids) + params.max_tokens > self._max_model_len:
                num_too_long += 1
                if num_too_long == _MOST_TOO_LONG:
                    raise ConfigError(
                        f"max_tokens: got {params.max_tokens}, expected fewer: none of {num_too_long} prompts leaves "
                        f"so many of {self._max_model_len}"
                    )
                continue
            num_too_long = 0
            request_id = str(self._num_asked)
            self._num_asked += 1
            self._open[request_id] = _Open(prompt, prompt_ids, params.temperature)
            self._core.handle(AddRequest(request_id=request_id, prompt_token_ids=prompt_ids, params=params))

    def _temperature(self) -> float:
        """Shares of requests, in turn: exact over every hundred."""
        place = self._num_asked * 37 % 100 / 100
        for temperature, share in self._plan.temperatures:
            if place < share:
                return temperature
            place -= share
        return self._plan.temperatures[-1][0]

    def _params(self) -> SamplingParams:
        """Of the next request."""
        plan, temperature = self._plan, self._temperature()
        return SamplingParams(
            max_tokens=plan.max_tokens[self._num_asked % len(plan.max_tokens)],
            min_tokens=plan.min_tokens,
            temperature=temperature,
            top_p=plan.top_p if temperature > 0.0 else 1.0,
            top_k=_TOP_K if temperature > 0.0 else 0,
            seed=plan.seed * 1_000_003 + self._num_asked,
        )

    def _take(self, output: RequestOutput, writer: SampleWriter, report: SamplingReport) -> None:
        item = self._open[output.request_id]
        item.answer_ids += output.token_ids
        if output.finish is not None:
            del self._open[output.request_id]
            self._keep(item, output.finish.reason, writer, report)

    def _keep(self, item: _Open, finish: str, writer: SampleWriter, report: SamplingReport) -> None:
        if not item.answer_ids:
            return
        answer = self._tokenizer.decode(item.answer_ids, skip_special_tokens=True)
        report.num_samples += 1
        report.num_tokens += len(item.answer_ids)
        writer.add(
            Sample(
                kind=item.prompt.kind,
                prompt=item.prompt.text,
                answer=answer,
                prompt_ids=item.prompt_ids,
                answer_ids=item.answer_ids,
                temperature=item.temperature,
                finish=finish,
            )
        )


def one_turn(tokenizer: Any, prompt: Prompt) -> str:
    """A chat in which the user has asked, and the model is to answer."""
    message = [{"role": "user", "content": prompt.text}]
    rendered: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return rendered


def sample_answers(
    model: str,
    plan: SamplingPlan,
    prompts: Iterator[Prompt],
    render: Render,
    writer: SampleWriter,
    seconds: float,
    limit: int | None,
) -> SamplingReport:
    """The whole stage in this process. `seconds` count from when the engine is ready."""
    core = EngineCore(sampling_engine(model, plan))
    tokenizer = load_hf_tokenizer(ModelConfig(model=model, tokenizer=plan.tokenizer))
    print(f"engine ready: {core.model_info.startup_seconds}", flush=True)
    sampler = AnswerSampler(core, tokenizer, render, plan, core.model_info.max_model_len)
    return sampler.run(prompts, writer, seconds, limit)

"""Serving and speculation metrics, in a registry of their own, and the endpoint that shows them.

Token and step figures come from the engine's steps, before streams merge them; figures of whole requests
from the service. docs/metrics.md explains every name; a test keeps the two equal. Knows no RPC
(interceptors.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from engine.errors import ConfigError
from engine.messages import RequestOutput, RequestTimes
from engine.stats import EngineStats, SpecObservation, StepStats
from server.choice import SpeculationTotals

PREFIX = "slipstream_"
TOKEN_BUCKETS = (
    .0005, .001, .002, .003, .004, .006, .008, .01, .015, .02, .03, .05, .1, .2, .5, 1, 5,
)  # fmt: skip
FIRST_TOKEN_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)  # fmt: skip
STEP_BUCKETS = tuple(0.0001 * 1.5**n for n in range(28))  # 0.1 ms to 5.7 s
COUNT_BUCKETS = tuple(2**n for n in range(18))  # tokens, 1 to 131,072


class Metrics:
    """One served model. Methods are called on the event loop; scraping happens in a thread of its own."""

    def __init__(self, registry: CollectorRegistry, model_name: str, max_speculative_tokens: int) -> None:
        self.registry = registry
        self._model = model_name
        self._last_token_at: dict[
            str, float
        ] = {}  # engine id of a live choice -> stamp; 0 before the first token
        self._define_load()
        self._define_requests()
        self._define_steps()
        self._define_speculation(max_speculative_tokens)

    # ---- the families --------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("model", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, ("model", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, ("model", *labels), buckets=buckets, registry=self.registry)

    def _define_load(self) -> None:
        self._running = self._gauge("requests_running", "Requests that own a row and blocks.")
        self._waiting = self._gauge("requests_waiting", "Requests in the queue.")
        self._estimated_wait = self._gauge(
            "estimated_time_to_first_token", "Seconds that a new request would wait for its first token."
        )
        self._kv_usage = self._gauge("kv_cache_usage_ratio", "Share of KV blocks that live requests hold.")
        self._kv_blocks = self._gauge("kv_blocks", "KV blocks by state: free, used, cached.", "state")
        self._engine_up = self._gauge("engine_up", "1 while the engine serves.").labels(self._model)
        self._startup = self._gauge("startup_seconds", "Seconds of each phase of the start.", "phase")
        self._start_time = self._gauge(
            "engine_start_time_seconds", "Unix time since when the engine serves; a change is a restart."
        )

    def _define_requests(self) -> None:
        model = self._model
        self._requests = self._counter("requests", "Choices that ended, by finish reason.", "finish_reason")
        self._rejected = self._counter("requests_rejected", "Requests refused before the engine.", "reason")
        self._slow_readers = self._counter(
            "slow_readers", "Requests ended because their client did not read."
        ).labels(model)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started choices.").labels(
            model
        )
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Of these, tokens found in the prefix cache."
        ).labels(model)
        self._generation_tokens = self._counter("generation_tokens", "Tokens emitted.").labels(model)
        self._first_token = self._histogram(
            "time_to_first_token", "Seconds from arrival to the first token.", FIRST_TOKEN_BUCKETS
        ).labels(model)
        self._output_token = self._histogram(
            "time_per_output_token", "Seconds per token after the first, mean of a choice.", TOKEN_BUCKETS
        ).labels(model)
        self._inter_token = self._histogram(
            "inter_token_latency",
            "Seconds per token; a step's gap is shared among its tokens.",
            TOKEN_BUCKETS,
        ).labels(model)
        self.inter_message = self._histogram(
            "inter_message_latency", "Seconds between two messages of a stream.", TOKEN_BUCKETS
        ).labels(model)
        self._e2e = self._histogram(
            "e2e_latency", "Seconds from arrival to the last token.", REQUEST_BUCKETS
        ).labels(model)
        self._queue = self._histogram(
            "queue_time", "Seconds from arrival to the first step.", FIRST_TOKEN_BUCKETS
        ).labels(model)
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a choice.", COUNT_BUCKETS
        ).labels(model)
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens emitted by a choice.", COUNT_BUCKETS
        ).labels(model)

    def _define_steps(self) -> None:
        self._preemptions = self._counter("preemptions", "Requests preempted and recomputed.").labels(
            self._model
        )
        self._step_time = self._histogram("step_time", "Seconds of a step, by phase.", STEP_BUCKETS, "phase")
        self._graph_replays = self._counter(
            "graph_replays", "Forward passes, by how they ran: full (one graph) or eager.", "kind", "stage"
        )
        self._padding_rows = self._counter(
            "graph_padding_rows", "Tokens that a graph computed for nobody, as it was larger than the step."
        ).labels(self._model)
        self._step_tokens = self._histogram(
            "step_tokens", "Tokens computed by a step.", COUNT_BUCKETS
        ).labels(self._model)

    def _define_speculation(self, max_speculative_tokens: int) -> None:
        lengths = tuple(float(length) for length in range(1, max_speculative_tokens + 2))
        prefix = "spec_decode_"
        self._acceptance_length = self._histogram(
            prefix + "acceptance_length",
            "Tokens emitted by a verification that had drafts.",
            lengths,
            "method",
        )
        self._request_acceptance_length = self._histogram(
            prefix + "request_acceptance_length", "Mean acceptance length of a choice.", lengths, "method"
        )
        self._verifications = self._counter(
            prefix + "verifications", "Verifications that had drafts, by their number k.", "method", "k"
        )
        self._draft_tokens = self._counter(
            prefix + "draft_tokens", "Drafts verified, by position.", "method", "position"
        )
        self._accepted_tokens = self._counter(
            prefix + "accepted_tokens", "Drafts among the emitted tokens, by position.", "method", "position"
        )
        self._verifier_accepted_tokens = self._counter(
            prefix + "verifier_accepted_tokens",
            "Drafts that the verifier accepted, before the cut.",
            "method",
        )
        self._emitted_tokens = self._counter(
            prefix + "emitted_tokens", "Tokens emitted by verifications that had drafts.", "method"
        )
        self._discarded_tokens = self._counter(
            prefix + "discarded_tokens", "Drafts that were not emitted, by reason.", "method", "reason"
        )
        self._not_overlapped = self._counter(
            prefix + "not_overlapped",
            "Times that a request waited for the step before, as its drafts are made on the host.",
        ).labels(self._model)
        self._not_drafted = self._counter(
            prefix + "not_drafted", "Times that a request got no drafts in a step, by reason.", "reason"
        )

    # ---- engine --------------------------------------------------------------------------------------------

    def engine_started(self, stats: Callable[[], EngineStats], startup_seconds: Mapping[str, float]) -> None:
        """From here on the load gauges read `stats` whenever they are scraped."""
        model = self._model
        self._running.labels(model).set_function(lambda: stats().num_running)
        self._waiting.labels(model).set_function(lambda: stats().num_waiting)
        self._kv_usage.labels(model).set_function(lambda: stats().kv_cache_usage)
        self._kv_blocks.labels(model, "free").set_function(lambda: stats().num_free_blocks)
        self._kv_blocks.labels(model, "used").set_function(lambda: stats().num_used_blocks)
        self._kv_blocks.labels(model, "cached").set_function(lambda: stats().num_cached_blocks)
        for phase, seconds in startup_seconds.items():
            self._startup.labels(model, phase).set(seconds)
        self._start_time.labels(model).set_to_current_time()
        self._engine_up.set(1)

    def admission_started(self, estimate: Callable[[], float]) -> None:
        self._estimated_wait.labels(self._model).set_function(estimate)

    def engine_stopped(self) -> None:
        self._engine_up.set(0)

    def on_step(self, outputs: list[RequestOutput], step: StepStats | None) -> None:
        """EngineClient.on_step: every step once, unmerged."""
        for output in outputs:
            if output.token_ids:
                self._generation_tokens.inc(len(output.token_ids))
                self._observe_tokens(output)
            for observation in output.spec:
                is_over_limit = output.finish is not None and output.finish.reason == "length"
                self._observe_verification(observation, "over_limit" if is_over_limit else "after_stop")
        if step is not None:
            self._observe_step(step)

    def _observe_tokens(self, output: RequestOutput) -> None:
        last = self._last_token_at.get(output.request_id)
        if last is None:
            return  # its client left, and the engine has not heard of it yet
        times = output.times
        self._last_token_at[output.request_id] = times.last_token
        num_tokens = len(output.token_ids)
        if last == 0.0:
            self._first_token.observe(times.first_token - times.arrival)
            self._queue.observe(times.first_scheduled - times.arrival)
            return
        share = (times.last_token - last) / num_tokens
        for _ in range(num_tokens):
            self._inter_token.observe(share)

    def _observe_step(self, step: StepStats) -> None:
        if step.num_preempted:
            self._preemptions.inc(step.num_preempted)
        if step.num_scheduled_tokens:
            self._step_tokens.observe(step.num_scheduled_tokens)
        if step.num_not_overlapped:
            self._not_overlapped.inc(step.num_not_overlapped)
        self._graph_replays.labels(self._model, step.graph_kind, "target").inc()
        self._padding_rows.inc(step.num_padding_tokens)
        for phase, seconds in step.phase_seconds.items():
            self._step_time.labels(self._model, phase).observe(seconds)
        for reason, count in step.not_drafted.items():
            self._not_drafted.labels(self._model, reason).inc(count)

    def _observe_verification(self, observation: SpecObservation, cut_reason: str) -> None:
        model, method = self._model, observation.method
        self._acceptance_length.labels(model, method).observe(observation.num_emitted)
        self._verifications.labels(model, method, observation.num_drafted).inc()
        for position in range(observation.num_drafted):
            self._draft_tokens.labels(model, method, position).inc()
        for position in range(observation.num_accepted):
            self._accepted_tokens.labels(model, method, position).inc()
        self._verifier_accepted_tokens.labels(model, method).inc(observation.num_verifier_accepted)
        self._emitted_tokens.labels(model, method).inc(observation.num_emitted)
        num_ruled_out = observation.num_discarded_by_grammar
        num_rejected = observation.num_drafted - observation.num_verifier_accepted - num_ruled_out
        self._discarded_tokens.labels(model, method, "rejected").inc(num_rejected)
        if num_ruled_out:
            self._discarded_tokens.labels(model, method, "grammar").inc(num_ruled_out)
        self._discarded_tokens.labels(model, method, cut_reason).inc(observation.num_discarded_after_stop)
        self._discarded_tokens.labels(model, method, "over_limit").inc(observation.num_discarded_over_limit)

    # ---- requests ------------------------------------------------------------------------------------------

    def request_rejected(self, reason: str) -> None:
        """`reason` is EngineError.reason, a name out of a fixed set."""
        self._rejected.labels(self._model, reason.lower()).inc()

    def choice_started(self, engine_id: str) -> None:
        self._last_token_at[engine_id] = 0.0

    def prompt_computed(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_tokens)

    def slow_reader(self) -> None:
        self._slow_readers.inc()

    def choice_ended(
        self,
        engine_id: str,
        finish_reason: str | None,  # None: the engine refused it
        *,
        num_prompt_tokens: int,
        num_tokens: int,
        times: RequestTimes,
        speculation: SpeculationTotals,
    ) -> None:
        """However it ended; what was not reached is not observed."""
        del self._last_token_at[engine_id]
        if finish_reason is None:
            return
        self._requests.labels(self._model, finish_reason).inc()
        self._request_prompt_tokens.observe(num_prompt_tokens)
        self._request_generation_tokens.observe(num_tokens)
        if times.last_token:
            self._e2e.observe(times.last_token - times.arrival)
        if num_tokens > 1:
            self._output_token.observe((times.last_token - times.first_token) / (num_tokens - 1))
        if speculation.num_verifications:
            self._request_acceptance_length.labels(self._model, speculation.method).observe(
                speculation.acceptance_length
            )


class MetricsEndpoint:
    """GET /metrics over HTTP, in a daemon thread. A context manager."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(f"metrics_port: cannot listen on {host}:{port}: {error.strerror}") from None

    @property
    def port(self) -> int:
        port: int = self._server.server_port
        return port

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

"""The scheduler on a fake device under any order of arrivals, aborts, launches and collections: every request
gets the tokens of plain decoding, every invariant holds after every step, and everything comes back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.draft_method import DraftMethod
from engine.errors import QueueFullError
from engine.request import Request
from engine.scheduler.draft_policy import DraftChoice, FixedDraftPolicy
from tests.support.scheduler_harness import SchedulerHarness, make_request, sliding_group
from tests.support.scripted_host import ScriptedHost

MAX_MODEL_LEN = 40
SHARED = [8 + (7 * index) % 29 for index in range(MAX_MODEL_LEN)]  # prompts begin alike


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler of a drawn shape: depth 1 or 2, k 0..5, block size 1, 4 or 16, often with a tiny pool."""

    harness: SchedulerHarness

    @initialize(
        block_size=st.sampled_from([1, 4, 16]),
        spare_tokens=st.sampled_from([0, 8, 40, 400]),
        depth=st.integers(1, 2),
        k=st.integers(0, 5),
        num_groups=st.integers(0, 2),
        window=st.sampled_from([None, 1, 2, 3, 5, 8, 17]),
        extra_window_keys=st.integers(0, 2),
        spare_blocks=st.sampled_from([0, 1, 3, 20]),
        drafter_kv=st.sampled_from(["none", "keeps up", "catches up"]),
        fed_windows=st.sampled_from([(None,), (3,), (None, 5)]),
        failure_rate=st.sampled_from([0.0, 0.1]),
        is_host=st.booleans(),
        enable_prefix_cache=st.booleans(),
        max_num_seqs=st.integers(1, 4),
        budget=st.sampled_from([1, 2, 3, 8, 40, 256]),
        max_chunk=st.sampled_from([None, 1, 5]),
        max_stall=st.sampled_from([None, 0.05]),
        seed=st.integers(0, 2**16),
    )
    def create(
        self,
        block_size: int,
        spare_tokens: int,
        depth: int,
        k: int,
        num_groups: int,
        window: int | None,
        extra_window_keys: int,
        spare_blocks: int,
        drafter_kv: str,
        fed_windows: tuple[int | None, ...],
        failure_rate: float,
        is_host: bool,
        enable_prefix_cache: bool,
        max_num_seqs: int,
        budget: int,
        max_chunk: int | None,
        max_stall: float | None,
        seed: int,
    ) -> None:
        generator = random.Random(seed)
        self.k = k
        self.num_requests = 0
        num_groups = max(num_groups, window is None)
        has_drafter = drafter_kv == "keeps up" and not is_host
        fed_windows = fed_windows if drafter_kv == "catches up" and not is_host else ()
        self.depth = depth
        num_full = -(-(MAX_MODEL_LEN + spare_tokens) // block_size)
        num_sliding = fewest_blocks((window or 0) + extra_window_keys, block_size) + spare_blocks
        num_blocks = [num_full] * num_groups + [num_sliding] * (window is not None) + [num_full] * has_drafter
        num_blocks += [num_full] * len(fed_windows)
        self.harness = SchedulerHarness(
            block_size=block_size,
            num_blocks=num_blocks,
            depth=depth,
            k=k,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_cache=enable_prefix_cache,
            num_groups=num_groups,
            sliding=sliding_group(window, extra_window_keys) if window else None,
            has_drafter=has_drafter,
            fed_windows=fed_windows,
            drafter_fails=lambda: generator.random() < failure_rate,
            make_policy=lambda methods: MoodyPolicy(methods, generator),
            num_right=lambda k: generator.randint(0, k),
            num_found=lambda k: generator.choice((0, k, generator.randint(0, k))),
            host=ScriptedHost(lambda k: generator.randint(0, k)) if is_host else None,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk=max_chunk,
            max_prefill_stall=max_stall,
            max_waiting=8,
        )

    @rule(
        num_shared=st.integers(0, 30),
        own=st.lists(st.integers(0, 39), max_size=8),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        cache_salt=st.sampled_from(["", "", "salt"]),
        tenant=st.sampled_from(["", "a", "b"]),
        ignore_eos=st.booleans(),
        method=st.sampled_from([None, None, "none", "auto"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        is_nan=st.sampled_from([False] * 9 + [True]),
    )
    def arrive(
        self,
        num_shared: int,
        own: list[int],
        max_tokens: int,
        priority: int,
        cache_salt: str,
        tenant: str,
        ignore_eos: bool,
        method: str | None,
        prompt_logprobs: int | None,
        is_nan: bool,
    ) -> None:
        name = f"r{self.num_requests}"
        message = make_request(
            name,
            (SHARED[:num_shared] + own) or [8],
            max_tokens=max_tokens,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            ignore_eos=ignore_eos,
            method=method,
            prompt_logprobs=prompt_logprobs,
            logprobs=0,
        )
        if is_nan:
            self.harness.device.nan_requests.add(name)
        try:
            self.harness.add(message)
        except QueueFullError:
            assert self.harness.scheduler.stats().num_waiting >= 8
        else:
            self.num_requests += 1

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = f"r{data.draw(st.integers(0, self.num_requests))}"
        received = self.harness.received.get(name)
        is_live = received is not None and received.finish is None
        assert len(self.harness.abort(name, name)) == is_live

    @rule()
    def launch(self) -> None:
        scheduler = self.harness.scheduler
        plan = self.harness.launch()
        if plan is None and scheduler.has_unfinished:
            assert self.harness.in_flight, "requests wait, nothing runs, and nothing can be launched"

    @precondition(lambda self: self.harness.in_flight)
    @rule(seconds=st.floats(0.0, 1.0))
    def collect(self, seconds: float) -> None:
        self.harness.scheduler.observe_step(self.harness.in_flight[0][0], seconds)
        self.harness.collect()

    @rule(count=st.integers(1, 6))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.run()
        device = harness.device
        assert device.num_void_feeds <= device.num_failures * (self.depth - 1)
        for received in harness.received.values():
            check_outputs(received.outputs[-1].num_preemptions, harness, received.message.request_id)


class MoodyPolicy(FixedDraftPolicy):
    """Some requests are without drafts for a while, now and then."""

    def __init__(self, methods: Sequence[DraftMethod], generator: random.Random) -> None:
        super().__init__(methods)
        self._generator = generator
        self._is_off: dict[str, bool] = {}

    def choose(self, request: Request, num_decoding: int) -> DraftChoice:
        choice = super().choose(request, num_decoding)
        if self._generator.random() < 0.1:
            self._is_off[request.request_id] = self._generator.random() < 0.5
        return choice._replace(k=0, reason="k_zero") if self._is_off.get(request.request_id) else choice


def fewest_blocks(num_keys: int, block_size: int) -> int:
    """With which one request can go on: those that so many neighbouring keys lie in at the worst."""
    return min(-(-MAX_MODEL_LEN // block_size), -(-(block_size - 1 + num_keys) // block_size))


def check_outputs(num_preemptions: int, harness: SchedulerHarness, name: str) -> None:
    """Logprobs match the tokens one by one, prompt logprobs come at most once, speculation counts add up."""
    received = harness.received[name]
    message, params = received.message, received.message.params
    assert [entry.token.token_id for entry in received.logprobs] == received.token_ids
    delivered = [output.prompt_logprobs for output in received.outputs if output.prompt_logprobs]
    if params.prompt_logprobs is not None and received.token_ids:
        (entries,) = delivered
        assert [entry.token.token_id for entry in entries[1:] if entry] == message.prompt_token_ids[1:]
    else:
        assert delivered == []
    for observation in received.spec:
        assert observation.num_accepted in (observation.num_emitted, observation.num_emitted - 1)
        assert 0 <= observation.num_accepted <= observation.num_verifier_accepted <= observation.num_drafted
    assert sum(observation.num_emitted for observation in received.spec) <= len(received.token_ids)
    assert num_preemptions <= harness.scheduler.stats().num_preemptions_total


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=500, stateful_step_count=50, deadline=None, derandomize=True, database=None
)

"""A scheduler on a fake device: launches and collects on command, gathers what each request got, and checks
after every step what must hold whatever happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import SchedulerConfig
from engine.draft_method import DraftMethod
from engine.kv_spec import KVGroupSpec
from engine.messages import AddRequest, FinishInfo, PositionLogprobs, RequestOutput, RequestTimes
from engine.params import Constraint, SamplingParams, SpeculationParams
from engine.request import Request
from engine.scheduler.draft_feeds import MIN_FEED
from engine.scheduler.draft_policy import DraftPolicy, FixedDraftPolicy
from engine.scheduler.grammars import Grammars
from engine.scheduler.host_drafts import HostDrafts
from engine.scheduler.replays import Replays
from engine.scheduler.scheduler import Scheduler
from engine.spec_decode.host import HostSpeculator
from engine.stats import SpecObservation
from engine.step import StepOutput, StepPlan
from tests.support.fake_device import VOCAB_SIZE, FakeDevice, continuation
from tests.support.kv_checks import KVChecks

EOS = 7
GROUPS = tuple(
    KVGroupSpec(name=name, layer_indices=(index,), num_kv_heads=1, head_size=1, bytes_per_token=1)
    for index, name in enumerate(("full", "other"))
)
DRAFTER_GROUP = KVGroupSpec(
    name="draft", layer_indices=(0,), num_kv_heads=1, head_size=1, bytes_per_token=1, is_drafter=True
)


def _no_grammar(constraint: Constraint) -> Any:
    raise AssertionError("no request of these tests has a grammar")


def sliding_group(window: int, extra_window_keys: int = 0) -> KVGroupSpec:
    return KVGroupSpec(
        name="sliding",
        layer_indices=(2,),
        num_kv_heads=1,
        head_size=1,
        bytes_per_token=1,
        window=window,
        extra_window_keys=extra_window_keys,
    )


def fed_group(window: int | None) -> KVGroupSpec:
    """Of a drafter that catches up."""
    return KVGroupSpec(
        name=f"fed.{window or 'full'}",
        layer_indices=(0,),
        num_kv_heads=1,
        head_size=1,
        bytes_per_token=1,
        window=window,
        is_drafter=True,
    )


@dataclass(frozen=True)
class FakeCut:
    num_kept: int
    finish: FinishInfo | None


class FakeCutter:
    """End token, max_tokens, context limit, whichever comes first in the run."""

    def __init__(self, message: AddRequest, max_model_len: int) -> None:
        self._ignore_eos = message.params.ignore_eos
        self._room = min(message.params.max_tokens, max_model_len - len(message.prompt_token_ids))

    def cut(self, run: list[int]) -> FakeCut:
        for index, token in enumerate(run):
            self._room -= 1
            if token == EOS and not self._ignore_eos:
                return FakeCut(index + 1, FinishInfo(reason="stop", eos_token_id=EOS))
            if self._room == 0:
                return FakeCut(index + 1, FinishInfo(reason="length"))
        return FakeCut(len(run), None)


@dataclass
class Received:
    """Everything that one client got."""

    message: AddRequest
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def logprobs(self) -> list[PositionLogprobs]:
        return [entry for output in self.outputs for entry in output.logprobs or []]

    @property
    def spec(self) -> list[SpecObservation]:
        return [observation for output in self.outputs for observation in output.spec]

    @property
    def finish(self) -> FinishInfo | None:
        return self.outputs[-1].finish if self.outputs else None


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    cache_salt: str = "",
    tenant: str = "",
    method: str | None = None,
    k: int | None = None,
    **params: Any,
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params}),
        speculation=SpeculationParams(method=method, num_speculative_tokens=k),
        priority=priority,
        cache_salt=cache_salt,
        tenant=tenant,
    )


class SchedulerHarness:
    """`k`: default number of drafts; `num_right(k)`: how many of them are right. `has_drafter`: whoever makes
    them has a KV group of its own. `host`: makes them on the host. Groups: `num_groups` without a window, `sliding`
    if there is one, the drafter's; `num_blocks` of all or of each. `fed_windows`: the drafter has KV groups with these
    windows, and catches up.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int | Sequence[int] = 64,
        depth: int = 1,
        k: int = 0,
        max_model_len: int = 128,
        enable_prefix_cache: bool = True,
        num_groups: int = 1,
        sliding: KVGroupSpec | None = None,
        num_right: Any = lambda k: k,
        num_found: Any = lambda k: k,
        has_drafter: bool = False,
        fed_windows: Sequence[int | None] = (),
        drafter_fails: Callable[[], bool] = lambda: False,
        drafter_context: int | None = None,
        host: HostSpeculator | None = None,
        make_policy: Callable[[Sequence[DraftMethod]], DraftPolicy] = FixedDraftPolicy,
        **config: Any,
    ) -> None:
        groups = GROUPS[:num_groups] if sliding is None else (*GROUPS[:num_groups], sliding)
        drafter_group = len(groups) if has_drafter else None
        if has_drafter:
            groups = (*groups, DRAFTER_GROUP)
        fed_groups = tuple(range(len(groups), len(groups) + len(fed_windows)))
        groups = (*groups, *(fed_group(window) for window in fed_windows))
        if isinstance(num_blocks, int):
            num_blocks = [num_blocks] * len(groups)
        method = DraftMethod(
            name="scripted",
            max_drafts=max(k, 1),
            kv_groups=fed_groups if drafter_group is None else (drafter_group,),
            catch_up="hidden" if has_drafter else "tokens" if fed_windows else "nothing",
            is_host=host is not None,
            max_context=drafter_context,
        )
        self.config = SchedulerConfig(**{"max_num_seqs": 4, "max_prefill_stall": None, **config})
        self.max_model_len = max_model_len
        self.now = 0.0
        self.scheduler = Scheduler(
            config=self.config,
            block_size=block_size,
            num_blocks=num_blocks,
            groups=groups,
            enable_prefix_cache=enable_prefix_cache,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            max_drafts=k,
            max_steps_in_flight=depth,
            draft_policy=make_policy((method,) if k else ()),
            host_drafts=HostDrafts({} if host is None else {method.name: host}, VOCAB_SIZE),
            grammars=Grammars(_no_grammar, VOCAB_SIZE),
            replays=Replays({}),
            make_cutter=lambda message: FakeCutter(message, max_model_len),
            clock=self._tick,
        )
        self.device = FakeDevice(
            num_blocks=num_blocks,
            windows=[group.window for group in groups],
            extra_window_keys=sliding.extra_window_keys if sliding else 0,
            block_size=block_size,
            num_right=num_right,
            num_found=num_found,
            drafts_on_host=host is not None,
            drafter_group=drafter_group,
            fed_groups=fed_groups,
            drafter_fails=drafter_fails,
        )
        self.block_size = block_size
        chunk = self.config.max_prefill_chunk or self.config.max_num_batched_tokens
        max_computed, max_missed = max(chunk, 1 + k), max(chunk, MIN_FEED)  # in a step
        max_unconfirmed = depth * max_computed + method.num_lookahead_slots
        # Only the step that closes the gap feeds what was missed and what it computes, the others one of them.
        max_unfed = max_missed + max_computed + (depth - 1) * max(max_missed, max_computed) + k
        self.checks = KVChecks(self.scheduler, block_size, max_unconfirmed, max_unfed)
        self.received: dict[str, Received] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: deque[tuple[StepPlan, StepOutput]] = deque()

    # ---- what a core does ----------------------------------------------------------------------------------

    def add(self, *messages: AddRequest) -> None:
        for message in messages:
            self.scheduler.add(message)
            self.received[message.request_id] = Received(message)

    def abort(self, *request_ids: str) -> list[RequestOutput]:
        outputs = self.scheduler.abort(request_ids)
        self._deliver(outputs)
        return outputs

    def launch(self) -> StepPlan | None:
        """Launch a step if one can be; the device runs it at once, its output is kept until `collect`."""
        steps = [plan.step for plan, _ in self.in_flight]
        self.scheduler.make_host_drafts()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._check_plan(plan)
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.execute(plan)))
            self.checks.check_launch(plan, steps, self.device.touched)
        return plan

    def collect(self) -> list[RequestOutput]:
        plan, output = self.in_flight.popleft()
        outputs = self.scheduler.complete(plan, output)
        self._deliver(outputs)
        self.check()
        return outputs

    def step(self) -> None:
        """As EngineCore.step: launch what can be launched, collect the oldest."""
        while self.launch() is not None:
            pass
        assert self.in_flight or not self.scheduler.has_unfinished, "requests wait and nothing can run"
        if self.in_flight:
            self.collect()

    def run(self, *messages: AddRequest) -> dict[str, Received]:
        """Add, and go on until nothing is left; everything must have come back."""
        self.add(*messages)
        for _ in range(10_000):
            if not self.scheduler.has_unfinished and not self.in_flight:
                break
            self.step()
        else:
            raise AssertionError("the scheduler does not come to an end")
        self.check_idle()
        return self.received

    # ---- what must hold ------------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.checks.check()

    def check_idle(self) -> None:
        """Nothing is left: all rows and blocks are free, every request ended with the tokens of plain
        decoding.
        """
        self.check()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
        assert stats.num_used_blocks == 0
        assert self.scheduler._running.rows.num_free == self.config.max_num_seqs
        for received in self.received.values():
            self.check_tokens(received)

    def check_tokens(self, received: Received) -> None:
        finish, tokens = received.finish, received.token_ids
        assert finish is not None, received.message.request_id
        expected = self.expected(received.message)
        if finish.reason in ("cancelled", "error"):
            expected = expected[: len(tokens)]
        assert tokens == expected, received.message.request_id

    def expected(self, message: AddRequest) -> list[int]:
        """The tokens of plain decoding, cut."""
        params = message.params
        room = min(params.max_tokens, self.max_model_len - len(message.prompt_token_ids))
        tokens = continuation(message.prompt_token_ids, room)
        is_cut = EOS in tokens and not params.ignore_eos
        return tokens[: tokens.index(EOS) + 1] if is_cut else tokens

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            received = self.received[output.request_id]
            assert received.finish is None, "an output after the last"
            received.outputs.append(output)
            assert len(received.token_ids) <= received.message.params.max_tokens

    def _check_plan(self, plan: StepPlan) -> None:
        assert 0 < plan.num_scheduled_tokens <= self.config.max_num_batched_tokens
        if self.config.max_prefill_chunk is not None:
            chunks = [entry.num_tokens for entry in plan.scheduled if entry.is_prefill]
            assert all(chunk <= self.config.max_prefill_chunk for chunk in chunks)

    def _tick(self) -> float:
        self.now += 1.0
        return self.now


def make_policy_request(policy: DraftPolicy, request_id: str, **fields: Any) -> Request:
    """A request as the scheduler shows it to a draft policy."""
    message = make_request(request_id, [8], **fields)
    return Request(
        request_id=request_id,
        message=message,
        cutter=FakeCutter(message, 128),
        order=(0, 0, 0),
        token_limit=9,
        stop_ids=(),
        token_ids=[8],
        times=RequestTimes(),
        kv_groups=(0,),
        draft_method=policy.method_of(message),
    )

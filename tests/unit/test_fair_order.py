"""Tenants take turns, a heavy one waits behind its own, nobody starves; one tenant alone is served as it arrives."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.messages import AddRequest
from tests.support.engine_harness import Harness, make_core, request, scripted_model

PROMPT = list(range(3, 13))


def one_at_a_time() -> EngineCore:
    return make_core(scripted_model(eos=()), scheduler={"max_num_seqs": 1})


def of(tenant: str, name: str, *, length: int = 10, priority: int = 0, max_tokens: int = 1) -> AddRequest:
    made = request(name, [3 + i % 50 for i in range(length)], priority=priority, max_tokens=max_tokens)
    return msgspec.structs.replace(made, tenant=tenant, cache_salt=name)


def served(core: EngineCore, requests: list[AddRequest]) -> list[str]:
    """Names in the order in which they finish."""
    harness, order = Harness(core), []
    for item in requests:
        harness.add(item)
    while core.has_work:
        harness.step()
        order += [name for name, result in harness.results.items() if result.finish and name not in order]
    return order


def test_a_tenant_with_one_request_does_not_wait_for_all_of_another_s() -> None:
    many = [of("heavy", f"h{i}") for i in range(6)]
    order = served(one_at_a_time(), [*many, of("light", "l0"), of("light", "l1")])
    assert order == ["h0", "l0", "h1", "l1", "h2", "h3", "h4", "h5"]


def test_long_prompts_use_up_a_turn() -> None:
    long = [of("long", f"a{i}", length=40) for i in range(2)]
    short = [of("short", f"b{i}", length=10) for i in range(5)]
    order = served(one_at_a_time(), [*long, *short])
    assert order == ["a0", "b0", "b1", "b2", "b3", "a1", "b4"]


def test_long_answers_are_paid_for_by_later_requests() -> None:
    core = one_at_a_time()
    served(core, [of("talks", "t", max_tokens=30), of("brief", "b")])
    later = [of("talks", "t1"), *(of("brief", f"b{i}") for i in range(1, 4))]
    assert served(core, later) == ["b1", "b2", "b3", "t1"]


def test_idle_time_is_not_saved_up() -> None:
    core = one_at_a_time()
    served(core, [of("busy", f"x{i}") for i in range(20)])
    later = [*(of("idle", f"z{i}") for i in range(20)), *(of("busy", f"y{i}") for i in range(3))]
    order = served(core, later)
    assert order.index("y0") < 8  # behind what it owes for its own answers, not for having been served at all
    assert order.index("y2") < 12


def test_priority_comes_before_fairness() -> None:
    order = served(
        one_at_a_time(),
        [of("a", "a0"), of("a", "a1"), of("b", "b0", priority=1), of("a", "urgent", priority=-1)],
    )
    assert order == ["urgent", "a0", "a1", "b0"]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_without_tenants_the_order_is_that_of_arrival(seed: int) -> None:
    generator = random.Random(seed)
    made = [
        of("", f"r{i}", length=generator.randrange(1, 60), max_tokens=generator.randrange(1, 4))
        for i in range(8)
    ]
    assert served(one_at_a_time(), made) == [item.request_id for item in made]


def test_shares_are_equal_when_all_tenants_always_have_requests() -> None:
    generator = random.Random(0)
    made = [
        of(tenant, f"{tenant}{i}", length=10, max_tokens=3)
        for i in range(20)
        for tenant in generator.sample(["a", "b", "c"], 3)
    ] + [of("a", f"more{i}", length=10, max_tokens=3) for i in range(40)]
    first = served(one_at_a_time(), made)[:30]
    assert set(Counter(name[0].replace("m", "a") for name in first).values()) == {10}

"""Readers wake in order and a few at a turn, so that whoever needs turns of the loop gets them in between."""

from __future__ import annotations

import asyncio

from engine.client.wakes import PER_TURN, Wakes


async def test_a_few_wake_at_each_turn_in_their_order() -> None:
    wakes, events = Wakes(), [asyncio.Event() for _ in range(3 * PER_TURN + 1)]
    for event in events:
        wakes.wake(event)
    num_set = []
    while not events[-1].is_set():
        await asyncio.sleep(0)
        num_set.append(sum(event.is_set() for event in events))
        assert all(event.is_set() for event in events[: num_set[-1]])
    assert num_set == [PER_TURN, 2 * PER_TURN, 3 * PER_TURN, 3 * PER_TURN + 1]


async def test_who_asks_meanwhile_comes_last_and_an_idle_one_begins_again() -> None:
    wakes = Wakes()
    early, late = [asyncio.Event() for _ in range(2 * PER_TURN)], asyncio.Event()
    for event in early:
        wakes.wake(event)
    await asyncio.sleep(0)
    wakes.wake(late)
    for _ in range(3):
        assert not late.is_set() or all(event.is_set() for event in early)
        await asyncio.sleep(0)
    assert late.is_set()
    again = asyncio.Event()
    wakes.wake(again)
    await asyncio.wait_for(again.wait(), timeout=10)

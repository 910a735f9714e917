"""What preempting others would give a waiting request is what it does give: by doing it."""

from __future__ import annotations

import random

import pytest

from engine.request import Request
from engine.scheduler.kv_manager import KVManager
from tests.support.kv_requests import make
from tests.support.scheduler_harness import GROUPS, sliding_group

BLOCK, NUM_BLOCKS, IN_FLIGHT = 4, 40, 5
PREFIXES = ([10] * 16, [10] * 8 + [11] * 12, [12] * 9)


def new_request(generator: random.Random, name: str, num_groups: int) -> Request:
    prompt = [*generator.choice(PREFIXES), *generator.choices(range(20, 22), k=generator.randrange(1, 9))]
    return make(name, prompt, num_groups=num_groups)


def run_some(kv: KVManager, generator: random.Random) -> list[Request]:
    """Requests that run; others have ended, with a step in flight or none."""
    requests = []
    for index in range(generator.randrange(2, 9)):
        request = new_request(generator, f"r{index}", generator.choice((1, 2, 2)))
        hit, length = kv.find_hit(request), len(request.token_ids)
        if max(kv.start_shortage(request, hit, [0, 0])) > 0:
            continue
        kv.start(request, hit)
        kv.grow(request, length)
        kv.commit(request, length, IN_FLIGHT)
        requests.append(request)
        if generator.random() < 0.3:
            kv.free(requests.pop(), generator.choice((0, IN_FLIGHT)), keep_findable=True)
    return requests


@pytest.mark.parametrize("seed", range(200))
def test_what_comes_back_is_what_was_counted(seed: int) -> None:
    generator = random.Random(seed)
    kv = KVManager(
        (GROUPS[0], sliding_group(window=6)), [NUM_BLOCKS, NUM_BLOCKS], BLOCK, enable_prefix_cache=True
    )
    running = run_some(kv, generator)
    head = new_request(generator, "head", 2)
    room = kv.room_to_make(head)
    victims = generator.sample(running, generator.randrange(len(running) + 1))
    could_be_enough = room.could_be_enough(victims)
    for request in victims:
        room.add_victim(request)
    assert could_be_enough or not room.is_enough([0, 0])
    spared = generator.sample(victims, generator.randrange(len(victims) + 1))
    for request in spared:
        room.remove_victim(request)
    for request in victims:
        if request not in spared:
            kv.free(request, IN_FLIGHT + 1, keep_findable=True)
    kv.release(IN_FLIGHT)
    kv.release(IN_FLIGHT + 1)
    lacks = kv.start_shortage(head, kv.find_hit(head), [0, 0])
    for group in range(2):
        reserve = [-NUM_BLOCKS] * 2
        reserve[group] = -lacks[group]
        assert room.is_enough(reserve)
        reserve[group] += 1
        assert not room.is_enough(reserve)

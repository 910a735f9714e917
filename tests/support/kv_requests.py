"""Requests for a KV manager without a scheduler: each has a row of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from engine.messages import RequestTimes
from engine.request import Request
from tests.support.scheduler_harness import FakeCutter, make_request

_rows = itertools.count()


def make(request_id: str, prompt: Sequence[int], num_groups: int = 1, **fields: object) -> Request:
    message = make_request(request_id, prompt, **fields)  # type: ignore[arg-type]
    return Request(
        request_id=request_id,
        message=message,
        cutter=FakeCutter(message, 1000),
        order=(0, 0),
        token_limit=1000,
        stop_ids=(),
        token_ids=list(prompt),
        times=RequestTimes(),
        row=next(_rows),
        kv_groups=tuple(range(num_groups)),
    )

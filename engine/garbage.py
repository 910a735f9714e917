"""Python's garbage collector in a process that serves: what was loaded is not looked at again, and what a step makes
is gone before anybody looks.

A tokenizer or torch brings some hundred thousand objects, and a full collection visits all of them: a tenth of a
second in which a server answers nobody and an engine computes nothing. A step makes a few objects for each of its
requests, which are gone with the next one: at Python's own threshold of 700 they would be looked at twice a step, in
vain.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MAX_YOUNG = 20_000  # objects more than at the last collection, at which there is another one


def spare_what_is_loaded() -> None:
    """Collect once, then leave everything that lives now out of collections, and collect seldom. Call it when loading
    is over, in a process that ends with what it loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_YOUNG, *gc.get_threshold()[1:])


@contextmanager
def no_collection() -> Iterator[None]:
    """While a CUDA graph is captured: destroying another one, as a collection might, would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""Python's garbage collector in a process that serves: what was loaded is not looked at again.

A tokenizer or torch brings some hundred thousand objects, and a full collection visits all of them: a tenth of a
second in which a server answers nobody and an engine computes nothing.
"""

from __future__ import annotations

import gc


def spare_what_is_loaded() -> None:
    """Collect once, then leave everything that lives now out of collections. Call it when loading is over, in a process
    that ends with what it loaded.
    """
    gc.collect()
    gc.freeze()

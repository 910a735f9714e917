"""Nothing is collected while a graph is captured."""

from __future__ import annotations

import gc

import pytest

from engine.garbage import no_collection


def test_collections_pause_and_go_on_after_an_error_too() -> None:
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), no_collection():
        _ = 1 / 0
    assert gc.isenabled()


def test_a_process_without_collections_stays_without() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

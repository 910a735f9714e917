"""The one real model of the tests: where its GGUF file is, fetched once into the cache folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tools.fetch_model import FetchError, resolve


@cache
def smollm2_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct.Q4_1.gguf. Fails the test, never skips it, when it cannot be had."""
    try:
        return Path(resolve("smollm2"))
    except FetchError as error:
        pytest.fail(f"SmolLM2 is needed: {error}", pytrace=False)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return smollm2_gguf()

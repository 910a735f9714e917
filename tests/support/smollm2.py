"""The one real model of the tests: where its GGUF file is, fetched once into the cache folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf_reference import load_gguf_reference
from tools.fetch_model import FetchError, resolve


@cache
def smollm2_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct.Q4_1.gguf. Fails the test, never skips it, when it cannot be had."""
    try:
        return Path(resolve("smollm2"))
    except FetchError as error:
        pytest.fail(f"SmolLM2 is needed: {error}", pytrace=False)


@cache
def smollm2_reference() -> Any:
    """SmolLM2 in transformers, float32: read once, which takes long, and shared, so nobody may change it."""
    return load_gguf_reference(smollm2_gguf())


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return smollm2_gguf()

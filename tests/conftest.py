"""Shared test settings: one torch thread (the suite shares a small machine), no network for model hubs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, so before any import

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("slipstream", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("slipstream")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _drafters_do_not_raise(request: pytest.FixtureRequest) -> Iterator[None]:
    """The engine outlives a drafter that raises, text and all; a test that does not mean to make one raise must not
    pass by that."""
    raised: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: raised.append(handler.format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("engine.spec_decode.speculator_set")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if raised and "drafter_fault" not in request.keywords:
        pytest.fail("a draft method raised:\n" + "\n".join(raised))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the GPU are skipped where there is none; tests of kernels belong to them where there is one."""
    has_device = torch.cuda.is_available()
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if has_device and item.path.parent.name == "kernels":
            item.add_marker(pytest.mark.gpu)
        if not has_device and "gpu" in item.keywords:
            item.add_marker(skip)

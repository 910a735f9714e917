"""Shared test settings: one torch thread (the suite shares a small machine), no network for model hubs."""

from __future__ import annotations

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

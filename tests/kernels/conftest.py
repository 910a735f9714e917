"""Kernels that are interpreted multiply as the device does."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    pytest.importorskip("triton", reason="triton is not installed on this platform")
    from tests.support.matrix_units import multiply_as_matrix_units, read_scalars_as_newer_versions

    multiply_as_matrix_units(monkeypatch)
    read_scalars_as_newer_versions(monkeypatch)

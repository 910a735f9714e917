"""Devices by their names."""

from __future__ import annotations

import pytest
import torch

from engine.assembly import resolve_device
from engine.errors import ConfigError


def test_a_numbered_device_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks where its tensors are; Triton, streams and captures take the current device."""
    current: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    monkeypatch.setattr("torch.empty", lambda *shape, device: None)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]


@pytest.mark.parametrize("name", ["cuda:99", "quantum", "cpu:x"])
def test_a_device_that_is_not_there_is_an_error_of_the_configuration(name: str) -> None:
    with pytest.raises(ConfigError, match=f"got '{name}'"):
        resolve_device(name)

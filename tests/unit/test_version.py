"""What a server says of its own version."""

from __future__ import annotations

import importlib.metadata

import pytest

from server import version


def test_it_is_that_of_the_installed_package() -> None:
    assert version.slipstream_version() == importlib.metadata.version("slipstream")


def test_a_checkout_that_was_never_installed_has_none_and_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", not_installed)
    assert version.slipstream_version() == "unknown"

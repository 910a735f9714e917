"""The version of this package, wherever it is shown."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def slipstream_version() -> str:
    """As it was installed; "unknown" in a checkout that never was, where a server runs too."""
    try:
        return version("slipstream")
    except PackageNotFoundError:
        return "unknown"

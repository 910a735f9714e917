"""The committed code in server/pb is what the protocol generates."""

from __future__ import annotations

from tools.protos import stale_files


def test_generating_again_changes_nothing() -> None:
    assert stale_files() == []

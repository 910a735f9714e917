"""What an engine does before its first request, on tensors that say they were on a GPU: nothing is launched there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed on this platform")

ROOT = Path(__file__).parents[2]
# Between them: all kinds of layers, drafters with a KV cache of their own and without one, distributions that are kept.
CASES = ("llama:eagle3:ratio", "gemma4_ple:gemma4_mtp:coupled", "deepseek_v3:mtp:coupled")


def test_passes_that_only_compile_fail_nowhere_and_leave_nothing() -> None:
    command = [sys.executable, "-m", "tests.support.compile_only_engine", *CASES]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == len(CASES)
    for report in reports:
        of_first_steps, of_all = report.pop("compiled")
        assert 20 < of_first_steps < of_all
        assert report == {"drafter_failures": 0, "caches_are_untouched": True, "host_reads": []}

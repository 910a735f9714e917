"""A pass run to compile what it launches, and to launch nothing. Compiling for a device needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed on this platform")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from engine.kernels import softcap
from engine.kernels.compile_ahead import compile_ahead

class Hopper:  # as far as compiling goes
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Hopper())
compiled = softcap._softcap_kernel.device_caches[0][0]

def run():
    for size in (64, 65, 128):  # the last one is compiled as the first
        logits = torch.ones(size)
        y = softcap.softcap_triton(logits, 30.0)
        assert not y.any() and logits.all()
        assert not logits.new_empty(3).any()

compile_ahead(run)
assert [type(kernel).__name__ for kernel in compiled.values()] == ["CompiledKernel"] * 2, compiled
compile_ahead(run)

def fail(*_, **__):
    raise OSError("no room")

def run_halves():
    softcap.softcap_triton(torch.ones(64, dtype=torch.float16), 30.0)

compiles, softcap._softcap_kernel.compile = softcap._softcap_kernel.compile, fail
compile_ahead(run_halves)
assert len(compiled) == 2, compiled
softcap._softcap_kernel.compile = compiles
compile_ahead(run_halves)
assert [type(kernel).__name__ for kernel in compiled.values()] == ["CompiledKernel"] * 3, compiled

try:
    compile_ahead(lambda: 1 / 0)
except ZeroDivisionError:
    print("raised")
try:
    softcap.softcap_triton(torch.ones(64), 30.0)
except AttributeError:  # nothing here can launch
    print("launched")
"""


def test_what_a_pass_launches_is_compiled_and_not_launched(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["raised", "launched"]

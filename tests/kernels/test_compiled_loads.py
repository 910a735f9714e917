"""Keys and values are loaded 16 bytes at once and without registers, whatever version of Triton compiles the kernel.

Compilers prove from the arithmetic of addresses that a load may be wide. Where a newer one no longer can, results are
the same and attention takes several times as long. Compiling for a device needs none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed on this platform")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.kernels.paged_attention import _paged_attention_kernel as kernel

rows, window, stages = map(int, sys.argv[1:])
heads, kv_heads, size = 8, 2, 128
constants = {
    "WINDOW": window, "NUM_HEADS": heads, "GROUP": 4, "GROUP_PAD": 4, "HEAD_SIZE": size, "HEAD_PAD": size,
    "BLOCK_SIZE": 16, "STRIDE_SLOT": kv_heads * size, "BLOCK_Q": rows // 4, "ONE_BLOCK": rows == 16, "SEGMENT": 64,
    "SPAN": 0, "SUM_COLUMNS": 2 * rows if rows < 64 else 16, "FIRST_PHASE": 2 if rows == 16 else 1, "FOLDS": False,
    "OVERLAPS": True,
}
pointers = {
    "partial_ptr": "*fp32", "stats_ptr": "*fp32", "counters_ptr": "*i32", "query_start_ptr": "*i32",
    "seq_lens_ptr": "*i32", "positions_ptr": "*i64", "block_table_ptr": "*i32", "scale": "fp32",
}
signature, values, attributes = {}, {}, {}
for index, name in enumerate(kernel.arg_names):
    if name in constants:
        signature[name], values[(index,)] = "constexpr", constants[name]
        continue
    signature[name] = pointers.get(name, "*bf16" if name.endswith("_ptr") else "i32")
    if name.endswith("_ptr") or "stride" in name:
        attributes[(index,)] = [["tt.divisibility", 16]]
source = ASTSource(kernel, signature, values, attributes)
options = {"num_warps": 4, "num_stages": stages, "enable_fp_fusion": False}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


@pytest.mark.parametrize(("rows", "window", "stages"), [(16, 0, 5), (16, 100, 2), (64, 0, 2)])
def test_keys_and_values_are_copied_16_bytes_at_once(
    rows: int, window: int, stages: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, *map(str, (rows, window, stages))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("cp.async.cg.shared.global") >= 16
    assert not {word for word in done.stdout.split() if word.startswith(("ld.global.b16", "ld.global.u16"))}

"""What a compiler makes of loads, whatever version of Triton compiles the kernel: how many bytes at once, and in which
order. Compiling for a device needs none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed on this platform")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, name, types, constants, options = map(json.loads, sys.argv[1:])
kernel = getattr(importlib.import_module(module), name)
signature, values, attributes = {}, {}, {}
for index, argument in enumerate(kernel.arg_names):
    if argument in constants:
        signature[argument], values[(index,)] = "constexpr", constants[argument]
        continue
    signature[argument] = types.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")
    if argument.endswith("_ptr") or "stride" in argument:
        attributes[(index,)] = [["tt.divisibility", 16]]
source = ASTSource(kernel, signature, values, attributes)
options["enable_fp_fusion"] = False
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def ptx_of(
    module: str,
    name: str,
    constants: dict[str, Any],
    *,
    types: dict[str, str],
    folder: Path,
    **options: int,
) -> list[str]:
    """Lines of the kernel's code for Hopper. types: of its arguments, where they are no pointers to bfloat16."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    words = [json.dumps(item) for item in (f"engine.kernels.{module}", name, types, constants, options)]
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def lines_with(code: list[str], instruction: str) -> list[int]:
    return [number for number, line in enumerate(code) if instruction in line]


@pytest.mark.parametrize(("rows", "window", "stages"), [(16, 0, 5), (16, 100, 2), (64, 0, 2)])
def test_keys_and_values_are_copied_16_bytes_at_once(
    rows: int, window: int, stages: int, tmp_path: Path
) -> None:
    """And without registers. Compilers prove from the arithmetic of addresses that a load may be wide. Where one no
    longer can, results are the same and attention takes several times as long.
    """
    heads, kv_heads, size = 8, 2, 128
    constants = {
        "WINDOW": window,
        "NUM_HEADS": heads,
        "GROUP": 4,
        "GROUP_PAD": 4,
        "HEAD_SIZE": size,
        "HEAD_PAD": size,
        "BLOCK_SIZE": 16,
        "STRIDE_SLOT": kv_heads * size,
        "BLOCK_Q": rows // 4,
        "ONE_BLOCK": rows == 16,
        "SEGMENT": 64,
        "SPAN": 0,
        "SUM_COLUMNS": 2 * rows if rows < 64 else 16,
        "FIRST_PHASE": 2 if rows == 16 else 1,
        "FOLDS": False,
        "OVERLAPS": True,
    }
    integers = ("counters", "query_start", "seq_lens", "block_table")
    types = {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "positions_ptr": "*i64", "scale": "fp32"}
    types |= {f"{name}_ptr": "*i32" for name in integers}
    code = ptx_of(
        *("paged_attention", "_paged_attention_kernel"),
        constants,
        types=types,
        folder=tmp_path,
        num_warps=4,
        num_stages=stages,
    )
    assert len(lines_with(code, "cp.async.cg.shared.global")) >= 16
    assert not lines_with(code, "ld.global.b16")
    assert not lines_with(code, "ld.global.u16")


@pytest.mark.parametrize(
    ("in_features", "is_gated", "tile", "block_n", "block_k", "stages", "warps"),
    [
        (4096, False, 16, 16, 512, 3, 2),
        (576, False, 16, 16, 128, 6, 2),
        (4096, True, 16, 32, 128, 3, 2),
        (576, True, 16, 32, 128, 4, 4),
        (4096, False, 32, 32, 256, 4, 4),
        (4096, False, 64, 64, 128, 6, 4),
        (4096, True, 64, 64, 128, 4, 4),
    ],
)
def test_weights_are_asked_for_before_the_kernel_in_front_has_ended(
    in_features: int,
    is_gated: bool,
    tile: int,
    block_n: int,
    block_k: int,
    stages: int,
    warps: int,
    tmp_path: Path,
) -> None:
    """Those of the first step; rows of x behind, as long as nobody waits for the weights. All 16 bytes at once."""
    constants = {
        "N": 4096,
        "K": in_features,
        "BLOCK_M": tile,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "HAS_BIAS": False,
        "HAS_FACTOR": False,
        "HAS_RESIDUAL": False,
        "IS_GATED": is_gated,
        "ACTIVATION": int(is_gated),
        "OVERLAPS": True,
    }
    code = ptx_of(
        *("skinny_linear", "_skinny_linear_kernel"),
        constants,
        types={},
        folder=tmp_path,
        num_warps=warps,
        num_stages=stages,
    )
    copies, waits = lines_with(code, "cp.async.cg.shared.global"), lines_with(code, "griddepcontrol.wait")
    first_strips = block_n * (2 if is_gated else 1) * block_k * 2 // (16 * 32 * warps)  # copies of a thread
    rows = tile * block_k * 2 // (16 * 32 * warps)
    assert sum(line < waits[0] for line in copies) == first_strips
    assert sum(line < lines_with(code, "cp.async.wait_group")[0] for line in copies) >= (
        (first_strips + rows) * (stages - 1)
    )
    assert not lines_with(code, "ld.global.b16")
    assert len(lines_with(code, "griddepcontrol.launch_dependents")) == 1
    assert lines_with(code, "griddepcontrol.launch_dependents")[0] > lines_with(code, "mma")[-1]

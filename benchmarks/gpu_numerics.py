"""What exact numerics cost on a GPU, part by part, and what fast ones change.

python -m benchmarks.gpu_numerics [--geometry llama-3.1-8b] [--only products texts] [--output FILE]

- products: by number of rows, microseconds of the library, of our kernel, and of what exact numerics choose of them,
  and whether the library's bits are ours;
- texts: prompts alone and in a batch of 20, greedy: how many get other tokens.
The cost of whole steps is `gpu_steps --numerics exact fast`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_engine import Setup, free_memory, start, write_report
from benchmarks.gpu_kernels import BYTES_IN_TURN, products_of, time_us
from engine.core import EngineCore
from engine.kernels.skinny_linear import Tiling, skinny_linear
from engine.layers.exact_products import ExactProducts
from engine.layers.product_trials import find_library_rows
from engine.layers.products import Product
from engine.messages import AddRequest
from engine.params import SamplingParams

Row = dict[str, Any]
PARTS = ("products", "texts")
NUM_PROMPTS, TEXT_TOKENS = 20, 128


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def measure_products(geometry: str, row_counts: list[int]) -> Iterator[Row]:
    shapes = {name: shape[:2] for name, shape in products_of(geometry).items()}
    for name, (out_features, in_features) in shapes.items():
        count = max(min(BYTES_IN_TURN // (out_features * in_features * 2), 50), 2)
        weights = [random(out_features, in_features) for _ in range(count)]
        products = ExactProducts()
        products.try_shapes([Product(weights)])
        plan = products.plan(weights[0], None)
        agreed = find_library_rows(weights[0], None)
        for num_rows in row_counts:
            x = random(num_rows, in_features)
            yield {
                "part": "products",
                "geometry": geometry,
                "product": name,
                "rows": num_rows,
                "library_us": time_us(partial(F.linear, x), weights),
                "kernel_us": time_us(partial(skinny_linear, x), weights),
                "exact_us": time_us(partial(products.linear, x, bias=None), weights),
                "library_agrees": num_rows in agreed,
                "row_counts_agreed": len(agreed),
                "fast_tilings": [plan.few is not None, plan.many is not None],
            }


def compare_instructions() -> Row:
    """mma.sync and wgmma, which Triton takes for tiles of 64 rows and four warps on Hopper."""
    x, weight = random(64, 4096), random(1024, 4096)
    results = [skinny_linear(x, weight, tiling=Tiling(64, 64, 3, num_warps)) for num_warps in (2, 4)]
    return {"part": "products", "wide_instruction_has_the_same_bits": torch.equal(*results)}


def count_changed_texts(geometry: str, numerics: str) -> Row:
    core, _ = start(Setup(geometry, numerics=numerics))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 200, (NUM_PROMPTS,), generator=generator).tolist()
    prompts = [torch.randint(3, 40000, (length,), generator=generator).tolist() for length in lengths]
    alone = {
        name: ids
        for index, prompt in enumerate(prompts)
        for name, ids in _texts(core, {str(index): prompt}).items()
    }
    together = _texts(core, {str(index): prompt for index, prompt in enumerate(prompts)})
    core.close()
    return {
        "part": "texts",
        "geometry": geometry,
        "numerics": numerics,
        "prompts": NUM_PROMPTS,
        "tokens": TEXT_TOKENS,
        "changed_by_neighbours": sum(alone[name] != together[name] for name in alone),
    }


def _texts(core: EngineCore, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    params = SamplingParams(max_tokens=TEXT_TOKENS, temperature=0.0, ignore_eos=True)
    texts: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        core.handle(AddRequest(request_id=name, prompt_token_ids=prompt, params=params))
    while core.has_work:
        message = core.step()
        for output in message.outputs if message else ():
            texts[output.request_id] += output.token_ids
    return texts


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    if "products" in arguments.only:
        yield compare_instructions()
    for geometry in arguments.geometry:
        if "products" in arguments.only:
            yield from measure_products(geometry, arguments.rows)
        if "texts" in arguments.only:
            for numerics in ("fast", "exact"):
                yield count_changed_texts(geometry, numerics)
                free_memory()
        free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--geometry", nargs="+", default=["smollm2-135m", "llama-3.1-8b"], choices=list(GEOMETRIES)
    )
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 17, 40, 64, 128, 256, 320, 4096])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for row in measure(arguments):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.output:
            write_report("gpu_numerics", arguments.output, rows, "cuda")


if __name__ == "__main__":
    main()

"""What the interpreter cannot show: a kernel that begins while the one before ends touches nothing before it has waited
(engine/kernels/dependent_launch.py)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "engine" / "kernels"
READS_WEIGHTS_EARLY = {"_resident_linear_kernel", "_skinny_linear_kernel"}
WEIGHTS = {"weight_ptr", "norm_weight_ptr", "bias_ptr", "weight_start", "up_start"}
WAITS = {"begin", "wait_for_previous"}
WRITES = ("store", "atomic_")


def functions() -> list[ast.FunctionDef]:
    trees = [ast.parse(path.read_text()) for path in sorted(KERNELS.glob("*.py"))]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def called(node: ast.AST) -> list[str]:
    calls = [item.func for item in ast.walk(node) if isinstance(item, ast.Call)]
    return [call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls]


def addresses(node: ast.AST) -> set[str]:
    """What is loaded from there, but for what stands behind a wait within a loop."""
    if isinstance(node, ast.For):
        waits = [index for index, item in enumerate(node.body) if "zero_after_previous" in called(item)]
        return set().union(*map(addresses, node.body[: waits[0] if waits else None]))
    return {
        base(item.args[0])
        for item in ast.walk(node)
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr == "load"
    }


def base(address: ast.AST) -> str:
    while isinstance(address, ast.BinOp):
        address = address.left
    assert isinstance(address, ast.Name)
    return address.id


DEPENDENT = [
    function
    for function in functions()
    if function.name.endswith("_kernel") and "OVERLAPS" in [argument.arg for argument in function.args.args]
]


def test_there_are_such_kernels() -> None:
    assert len(DEPENDENT) > 25


@pytest.mark.parametrize("kernel", DEPENDENT, ids=lambda kernel: str(kernel.name))
def test_it_waits_before_it_reads_writes_or_ends(kernel: ast.FunctionDef) -> None:
    waits = [index for index, node in enumerate(kernel.body) if WAITS & set(called(node))]
    assert len(waits) == 1, "one wait, of every program"
    assert isinstance(kernel.body[waits[0]], ast.Expr), "under no condition"
    before = kernel.body[: waits[0]]
    names = [name for node in before for name in called(node)]
    assert not any(name.startswith(WRITES) for name in names)
    assert "load" not in names or kernel.name in READS_WEIGHTS_EARLY
    for node in before:
        assert addresses(node) <= WEIGHTS
    assert not any(isinstance(item, ast.Return) for node in before for item in ast.walk(node))


def launches(function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """Kernels that it launches, and whether as `launch_options` says."""
    holders: set[str] = set()  # variables

    def holds_options(value: ast.AST) -> bool:
        names = {item.id for item in ast.walk(value) if isinstance(item, ast.Name)}
        return "launch_options" in called(value) or bool(names & holders)

    for node in ast.walk(function):  # in the order of statements
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and holds_options(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            holders |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            spread = [keyword.value for keyword in node.keywords if keyword.arg is None]
            yield getattr(node.func.value, "id", ""), any(map(holds_options, spread))


def test_who_waits_is_launched_so_and_nobody_else() -> None:
    launched = {
        item for function in functions() for item in launches(function) if item[0].endswith("_kernel")
    }
    waiting = {kernel.name for kernel in DEPENDENT}
    assert {name for name, is_dependent in launched if is_dependent} == waiting
    assert not {name for name, is_dependent in launched if not is_dependent} & waiting

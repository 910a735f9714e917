"""Loads checkpoint tensors into a model's, strictly: everything must be there, fit, and be wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from engine.errors import CheckpointError

# Old checkpoints carry this buffer; it follows from the config.
IGNORED_SUFFIX = "rotary_emb.inv_freq"
MAX_NAMED = 12  # tensors of a kind of problem: a checkpoint of another model has hundreds


def load_strict(
    model_name: str,
    targets: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
    tied: Mapping[str, str] | None = None,
) -> None:
    """Copy every weight into the target of its name, converting the dtype.

    `tied`: names that a checkpoint may repeat -> the target that they must equal. Raises CheckpointError
    telling of all unknown, missing, misshapen and unequal tensors at once, and naming the first of each.
    """
    tied = tied or {}
    repeated: dict[str, torch.Tensor] = {}
    missing = set(targets)
    unknown, unfit = [], []
    for name, weight in weights:
        target = targets.get(tied.get(name, name))
        if target is None:
            if not name.endswith(IGNORED_SUFFIX):
                unknown.append(name)
        elif weight.shape != target.shape:
            missing.discard(name)
            unfit.append(f"{name} (got shape {list(weight.shape)}, expected {list(target.shape)})")
        elif not weight.is_floating_point():
            missing.discard(name)
            unfit.append(f"{name} (got {weight.dtype}, expected a floating-point type)")
        elif name in tied:
            repeated[name] = weight
        else:
            missing.discard(name)
            target.copy_(weight)
    problems = {
        "unknown": sorted(unknown),
        "missing": sorted(missing),
        "misshapen": unfit,
        "unequal to the tensor they are tied to": [
            name
            for name, weight in repeated.items()
            if tied[name] not in missing and not _is_copy(weight, targets[tied[name]])
        ],
    }
    found = [f"{kind}: {_first(names)}" for kind, names in problems.items() if names]
    if found:
        raise CheckpointError(f"the checkpoint does not fit {model_name}; tensors " + "; ".join(found))


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _is_copy(weight: torch.Tensor, target: torch.Tensor) -> bool:
    return torch.equal(weight.to(device=target.device, dtype=target.dtype), target)

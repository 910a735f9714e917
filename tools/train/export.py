"""Writes a model as a checkpoint directory: config, weights and, for a target, how it generates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Floating-point tensors in the config's dtype. The weights appear at once and whole."""
    dtype = getattr(torch, config["dtype"])
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: (tensor.detach().to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    write_json(folder / "config.json", config)
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(
        (folder / "config.json").stat().st_mode
    )  # safetensors makes files that only their owner reads
    partial.rename(folder / "model.safetensors")
    if generation_config is not None:
        write_json(folder / "generation_config.json", generation_config)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Which attention backend runs under which name. Backends are imported when they are chosen: Triton may be absent."""

from __future__ import annotations

from importlib import import_module

import torch

from engine.attention.backend import AttentionBackend
from engine.registry import Registry

ATTENTION_BACKENDS: Registry[str] = Registry(
    "attention_backend",
    {
        "torch": "engine.attention.torch_backend:TorchAttentionBackend",
        "triton": "engine.attention.triton_backend:TritonAttentionBackend",
    },
)


def make_attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """ "auto" is triton on CUDA and torch elsewhere. Raises ConfigError for an unknown name."""
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    module, _, class_name = ATTENTION_BACKENDS.get(name).partition(":")
    backend = getattr(import_module(module), class_name)()
    assert isinstance(backend, AttentionBackend)
    return backend

"""Which attention backend runs under which name. Backends are imported when they are chosen: Triton may be absent."""

from __future__ import annotations

from importlib import import_module

import torch

from engine.attention.backend import AttentionBackend
from engine.errors import ConfigError
from engine.registry import Registry

ATTENTION_BACKENDS: Registry[str] = Registry(
    "attention_backend",
    {
        "torch": "engine.attention.torch_backend:TorchAttentionBackend",
        "triton": "engine.attention.triton_backend:TritonAttentionBackend",
    },
)


def attention_backend_name(name: str, device: torch.device) -> str:
    """ "auto" is triton on CUDA and torch elsewhere."""
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    return name


def make_attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """Raises ConfigError for an unknown name, and for a backend that cannot compute on the device."""
    module, _, class_name = ATTENTION_BACKENDS.get(attention_backend_name(name, device)).partition(":")
    backend = getattr(import_module(module), class_name)()
    assert isinstance(backend, AttentionBackend)
    if not backend.runs_on(device):
        raise ConfigError(f"attention_backend: got {name!r} on {device}, expected 'torch' or 'auto' there")
    return backend

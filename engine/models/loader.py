"""From a model's name to a model with weights on the device. Knows no particular source or model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.checkpoint.open import open_checkpoint
from engine.checkpoint.source import CheckpointSource, eos_token_ids
from engine.config import DTypeName, DummyWeightsName, ModelConfig
from engine.errors import CheckpointError
from engine.messages import LoadProgress
from engine.models.base import CausalLM
from engine.models.registry import MODELS

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DUMMY_STD = 0.02  # of normal weights
DUMMY_BOUND = 1e-3  # of uniform ones


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run, and what its checkpoint says beside the weights."""

    model: CausalLM
    raw_config: dict[str, Any]
    architecture: str
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json together
    num_parameters: int
    weight_bytes: int
    source: CheckpointSource | None = None  # of the weights; None: they are random
    dummy_weights: DummyWeightsName = "normal"  # where they are random


def load_model(
    config: ModelConfig,
    *,
    device: torch.device,
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
) -> LoadedModel:
    """Raises CheckpointError for whatever is wrong with the checkpoint, naming it."""
    source = open_checkpoint(config)
    raw_config = source.config()
    end_ids = eos_token_ids(raw_config, source.generation_config())
    architecture = _architecture(raw_config)
    dtype = resolve_dtype(config.dtype, raw_config, device)
    model = MODELS.get(architecture)(raw_config, dtype, device)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if config.load_format == "dummy":
        _fill_randomly(model.parameters(), config.seed, config.dummy_weights)
    else:
        model.load_weights(_with_progress(source, weight_bytes, dtype, on_progress))
    return LoadedModel(
        model=model.eval(),
        raw_config=raw_config,
        architecture=architecture,
        dtype=dtype,
        # Others are never drawn, and are no columns of the logits.
        eos_token_ids=tuple(token_id for token_id in end_ids if 0 <= token_id < model.vocab_size),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=weight_bytes,
        source=None if config.load_format == "dummy" else source,
        dummy_weights=config.dummy_weights,
    )


class CheckpointPart(Protocol):
    """A module whose weights stand beside a model's in one checkpoint."""

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...


def load_part(part: CheckpointPart, loaded: LoadedModel) -> None:
    """Weights from the checkpoint that the model came from; random ones for a model with random ones. Raises
    CheckpointError."""
    load_drafter(part, loaded.source, loaded)


def load_drafter(part: CheckpointPart, source: CheckpointSource | None, target: LoadedModel) -> None:
    """Weights from a checkpoint of the drafter's own; random ones for a target with random ones. Raises
    CheckpointError."""
    if target.source is None or source is None:
        _fill_randomly(part.parameters(), target.num_parameters, target.dummy_weights)
    else:
        part.load_weights((name, torch.as_tensor(values)) for name, values in source.tensors())


def resolve_dtype(name: DTypeName, raw_config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """What "auto" stands for: the checkpoint's own; if it names none, float32 on CPU, else bfloat16."""
    if name == "auto":
        saved = _saved_dtype(raw_config)
        if saved is None:
            return torch.float32 if device.type == "cpu" else torch.bfloat16
        name = saved
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"dtype: got {name!r}, expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _saved_dtype(raw_config: Mapping[str, Any]) -> Any:
    """By either name; of a multimodal checkpoint also that of its decoder."""
    for values in (raw_config, raw_config.get("text_config")):
        if isinstance(values, Mapping) and (saved := values.get("dtype") or values.get("torch_dtype")):
            return saved
    return None


def _architecture(raw_config: Mapping[str, Any]) -> str:
    architectures = raw_config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise CheckpointError(f"architectures: got {architectures!r}, expected a list of one name")
    return str(architectures[0])


def _with_progress(
    source: CheckpointSource,
    weight_bytes: int,
    dtype: torch.dtype,
    on_progress: Callable[[LoadProgress], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    loaded_bytes = 0
    for name, values in source.tensors():
        tensor = torch.as_tensor(values)
        yield name, tensor
        loaded_bytes += tensor.numel() * dtype.itemsize
        on_progress(LoadProgress(phase="load", fraction=min(loaded_bytes / weight_bytes, 1.0)))


def _fill_randomly(parameters: Iterable[torch.nn.Parameter], seed: int, kind: DummyWeightsName) -> None:
    """As `DummyWeightsName` says; repeatable by the seed."""
    for index, parameter in enumerate(parameters):
        generator = torch.Generator(parameter.device).manual_seed(seed + index)
        if kind == "uniform":
            parameter.uniform_(-DUMMY_BOUND, DUMMY_BOUND, generator=generator)
        elif parameter.ndim == 1:  # norm weights and biases: nothing degenerates
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, DUMMY_STD, generator=generator)

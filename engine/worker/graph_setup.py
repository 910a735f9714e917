"""Which CUDA graphs an engine may capture, and the first of them: joins the configuration and the managers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from engine.attention.backend import AttentionBackend
from engine.batch.block_tables import BlockTables
from engine.config import EngineConfig
from engine.cudagraph import MAX_GRAPH_CONTEXT, SIZES, BatchLimits, CaptureQueue, CudaRecorder
from engine.draft_method import DraftMethod
from engine.errors import ConfigError
from engine.kernels.compile_ahead import compile_ahead
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts
from engine.messages import ModelInfo
from engine.spec_decode.speculator_set import SpeculatorSet
from engine.worker.graphs import TargetGraphManager
from engine.worker.model_runner import ModelRunner
from engine.worker.step_graphs import StepLimits
from engine.worker.target import EagerTarget, TargetForward

MIN_CHUNK_TOKENS = 1024  # of a step with prompt chunks, that are captured whatever the model
# Tokens times weights of a product. Not measured: what a GPU does at 600 TFLOP/s in 80 us, that two launches are taken
# to last. Twice or half of it only moves where padded replays give way to launches.
LAUNCH_BOUND = 24e9


def make_captures(
    config: EngineConfig, backend: AttentionBackend, device: torch.device
) -> CaptureQueue | None:
    """As far as the configuration and the device allow any. Raises ConfigError if graphs are asked for in vain."""
    is_possible = device.type == "cuda" and backend.is_capturable
    if config.cuda_graphs in ("full_decode", "full") and not is_possible:
        raise ConfigError(
            f"cuda_graphs: got {config.cuda_graphs!r} with the attention backend {config.attention_backend!r} on "
            f"{device}, expected a backend whose launches can be captured, on CUDA"
        )
    if config.cuda_graphs == "none" or not is_possible:
        return None
    return CaptureQueue(CudaRecorder(device), compile_ahead=compile_ahead)


def with_graphs(
    eager: EagerTarget,
    block_tables: BlockTables,
    config: EngineConfig,
    info: ModelInfo,
    captures: CaptureQueue | None,
) -> TargetForward:
    """The target, with the forward pass of its smaller steps captured."""
    if captures is None:
        return eager
    return TargetGraphManager(
        eager,
        limits=_batch_limits(config, info, eager.model),
        block_size=info.block_size,
        max_blocks=block_tables.max_blocks,
        device=block_tables.tables[0].device,
        captures=captures,
    )


def _batch_limits(config: EngineConfig, info: ModelInfo, target: nn.Module) -> BatchLimits:
    is_full = config.cuda_graphs != "full_decode"
    most = max(size for size in SIZES if size <= max(MIN_CHUNK_TOKENS, launch_bound_tokens(target)))
    return BatchLimits(
        num_reqs=info.max_num_seqs,
        max_seq_len=min(info.max_model_len, MAX_GRAPH_CONTEXT),
        decode_query_len=1 + config.max_speculative_tokens,
        chunk_tokens=min(info.max_num_batched_tokens, most) if is_full else 0,
    )


def launch_bound_tokens(model: nn.Module) -> int:
    """Up to so many tokens, a step's launches take longer than what they launch; padding costs less then."""
    layers = [layer for layer in model.modules() if isinstance(layer, (Linear, RoutedExperts))]
    num_weights = sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False))
    return int(LAUNCH_BOUND * len(layers) / num_weights) if num_weights else 0


def init_graphs(
    runner: ModelRunner,
    eager: EagerTarget,
    speculators: SpeculatorSet,
    methods: Sequence[DraftMethod],
    config: EngineConfig,
    info: ModelInfo,
    captures: CaptureQueue,
) -> None:
    """Whole steps and draft passes may be captured from now on."""
    limits = StepLimits(
        num_reqs=info.max_num_seqs,
        max_seq_len=info.max_model_len,
        num_drafts={
            method.name: method.max_drafts for method in methods if method.name in speculators.needs_by_method
        },
        verified_drafts=config.max_speculative_tokens,
    )
    speculators.init_cudagraph_managers(captures, _batch_limits(config, info, eager.model))
    runner.init_graphs(captures, eager, limits)

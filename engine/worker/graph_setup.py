"""Which CUDA graphs an engine may capture, and the first of them: joins the configuration and the managers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.backend import AttentionBackend
from engine.batch.block_tables import BlockTables
from engine.config import EngineConfig
from engine.cudagraph import MAX_CHUNK_TOKENS, MAX_GRAPH_CONTEXT, BatchLimits, CaptureQueue, CudaRecorder
from engine.draft_method import DraftMethod
from engine.errors import ConfigError
from engine.messages import ModelInfo
from engine.spec_decode.speculator_set import SpeculatorSet
from engine.worker.graphs import TargetGraphManager
from engine.worker.model_runner import ModelRunner
from engine.worker.step_graphs import StepLimits
from engine.worker.target import EagerTarget, TargetForward

NUM_GRAPHS_AT_START = 4  # the engine is ready after them; the others follow while it waits for requests


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
    return CaptureQueue(CudaRecorder(device))


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
        limits=_batch_limits(config, info),
        block_size=info.block_size,
        max_blocks=block_tables.max_blocks,
        device=block_tables.tables[0].device,
        captures=captures,
    )


def _batch_limits(config: EngineConfig, info: ModelInfo) -> BatchLimits:
    is_full = config.cuda_graphs != "full_decode"
    return BatchLimits(
        num_reqs=info.max_num_seqs,
        max_seq_len=min(info.max_model_len, MAX_GRAPH_CONTEXT),
        decode_query_len=1 + config.max_speculative_tokens,
        chunk_tokens=min(info.max_num_batched_tokens, MAX_CHUNK_TOKENS) if is_full else 0,
    )


def init_graphs(
    runner: ModelRunner,
    eager: EagerTarget,
    speculators: SpeculatorSet,
    methods: Sequence[DraftMethod],
    config: EngineConfig,
    info: ModelInfo,
    captures: CaptureQueue,
) -> None:
    """Whole steps and draft passes from now on; capture the first ones."""
    limits = StepLimits(
        num_reqs=info.max_num_seqs,
        max_seq_len=info.max_model_len,
        num_drafts={
            method.name: method.max_drafts for method in methods if method.name in speculators.needs_by_method
        },
        verified_drafts=config.max_speculative_tokens,
    )
    speculators.init_cudagraph_managers(captures, _batch_limits(config, info))
    runner.init_graphs(captures, eager, limits)
    for _ in range(NUM_GRAPHS_AT_START):
        runner.capture_next()

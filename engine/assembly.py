"""Builds the parts of an engine from its configuration: device, weights, KV cache, runner, scheduler.

The one place that knows all of them; nothing here runs after start-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from tokenizers import Tokenizer

from engine.attention.metadata import LayerKVCache
from engine.attention.registry import make_attention_backend
from engine.batch.block_tables import BlockTables
from engine.checkpoint.tokenizer_files import tokenizer_json
from engine.config import EngineConfig
from engine.draft_method import DraftMethod
from engine.errors import ConfigError
from engine.executor import Executor, SingleExecutor
from engine.finish import RequestCutter
from engine.kv_spec import KVGroupSpec, KVGroupUsage
from engine.messages import AddRequest, LoadProgress, ModelInfo
from engine.models.base import CausalLM
from engine.models.loader import LoadedModel, load_model
from engine.sampling.draft_distributions import DraftDistributions
from engine.sampling.ratio_rule import RatioRule
from engine.sampling.synthetic_rule import SyntheticRule
from engine.sampling.verification_rule import CoupledRule, VerificationRule
from engine.scheduler.adaptive_policy import AdaptiveDraftPolicy
from engine.scheduler.adjustable_policy import AdjustableDraftPolicy
from engine.scheduler.grammars import make_grammars
from engine.scheduler.host_drafts import HostDrafts
from engine.scheduler.replays import Replays
from engine.scheduler.scheduler import Scheduler
from engine.spec_decode.autoregressive import DraftModelSpeculator
from engine.spec_decode.host import HostSpeculator
from engine.spec_decode.registry import Speculator, init_speculator
from engine.spec_decode.replay import LookupMethod, LookupReplay
from engine.spec_decode.speculator import BaseSpeculator, DraftContext
from engine.spec_decode.speculator_set import SpeculatorSet
from engine.text.incremental_decoder import IncrementalDecoder, load_tokenizer
from engine.worker.first_steps import prepare_first_steps
from engine.worker.graph_setup import init_graphs, make_captures, with_graphs
from engine.worker.memory import allocate_caches, choose_num_blocks
from engine.worker.model_runner import ModelRunner
from engine.worker.numerics import set_numerics
from engine.worker.target import EagerTarget


@dataclass(frozen=True)
class EngineParts:
    """What EngineCore drives."""

    scheduler: Scheduler
    executor: Executor
    draft_policy: AdjustableDraftPolicy
    model_info: ModelInfo


@dataclass
class _StartupClock:
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def build_engine(config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> EngineParts:
    """Load the checkpoint that the configuration names. Raises ConfigError or CheckpointError."""
    device = resolve_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    clock = _StartupClock()
    loaded = load_model(config.model, device=device, on_progress=on_progress)
    clock.lap("load")
    return assemble(config, loaded, device=device, startup_seconds=clock.seconds)


def resolve_device(name: str) -> torch.device:
    """ "auto" is the first accelerator, or the CPU. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: got {name!r}, which torch cannot use: {error}") from None
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # of this thread, the engine's: kernels of our own take it
    return device


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    device: torch.device,
    speculators: Mapping[str, Speculator] | None = None,
    wrap_executor: Callable[[Executor], Executor] = lambda executor: executor,
    startup_seconds: dict[str, float] | None = None,
) -> EngineParts:
    """The parts around a loaded model. `speculators`: draft methods by name, instead of building them."""
    model = loaded.model
    if speculators is None:
        speculators = {item.method: init_speculator(item, loaded, device) for item in config.speculators}
    on_device = {name: item for name, item in speculators.items() if isinstance(item, BaseSpeculator)}
    on_host = {name: item for name, item in speculators.items() if isinstance(item, HostSpeculator)}
    # Made-up acceptance cannot be found out from the text.
    lookups = {} if config.synthetic_acceptance is not None else _lookups(speculators)
    methods, groups = _plan_groups(config, model, on_device, lookups)
    max_model_len = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    # Before the KV cache takes its share of what is free: the ratio test keeps whole distributions.
    rule = _make_rule(config, loaded, device)
    numerics = set_numerics(config, loaded, device)
    # Steps overlap where launching does not wait for the result.
    depth = config.max_steps_in_flight or (2 if device.type == "cuda" else 1)
    num_blocks = choose_num_blocks(
        config.cache,
        groups,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_tokens_in_flight=depth * config.scheduler.max_num_batched_tokens,
    )
    model_info = msgspec.structs.replace(
        _describe(config, loaded, groups, num_blocks, max_model_len),
        device=str(device),
        max_steps_in_flight=depth,
        numerics=numerics,
        speculators=tuple(speculators),
        startup_seconds=dict(startup_seconds or {}),
    )
    started_at = time.perf_counter()
    runner = _make_runner(config, loaded, model_info, on_device, methods, groups, rule, device)
    model_info.startup_seconds["capture"] = time.perf_counter() - started_at
    default = config.default_speculator
    draft_policy = AdjustableDraftPolicy(methods, default, lambda on: AdaptiveDraftPolicy(on, default))
    scheduler = Scheduler(
        config=config.scheduler,
        block_size=config.cache.block_size,
        num_blocks=num_blocks,
        groups=groups,
        enable_prefix_cache=config.cache.enable_prefix_cache,
        max_model_len=max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        max_drafts=config.max_speculative_tokens,
        max_steps_in_flight=depth,
        draft_policy=draft_policy,
        host_drafts=HostDrafts(on_host, model.vocab_size),
        grammars=make_grammars(config, model.vocab_size, loaded.eos_token_ids),
        replays=Replays(lookups),
        make_cutter=_CutterFactory(config, loaded.eos_token_ids, max_model_len),
    )
    return EngineParts(scheduler, wrap_executor(SingleExecutor(runner)), draft_policy, model_info)


def _describe(
    config: EngineConfig,
    loaded: LoadedModel,
    groups: Sequence[KVGroupSpec],
    num_blocks: Sequence[int],
    max_model_len: int,
) -> ModelInfo:
    """What the frontend is told of the engine."""
    kv_groups = tuple(
        KVGroupUsage(
            name=group.name,
            window=group.window,
            bytes_per_token=group.bytes_per_token,
            num_blocks=count,
        )
        for group, count in zip(groups, num_blocks, strict=True)
    )
    num_bytes = config.cache.block_size * sum(group.bytes_per_token * group.num_blocks for group in kv_groups)
    return ModelInfo(
        model_name=config.model.name,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=config.device,
        vocab_size=loaded.model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        kv_bytes_per_token=sum(group.bytes_per_token for group in kv_groups),
        kv_cache_bytes=num_bytes,
        kv_groups=kv_groups,
        num_blocks=max(num_blocks),
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_steps_in_flight=1,
        default_speculator=config.default_speculator,
        synthetic_acceptance=config.synthetic_acceptance or (),
    )


def _make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    info: ModelInfo,
    speculators: Mapping[str, BaseSpeculator],
    methods: Sequence[DraftMethod],
    groups: Sequence[KVGroupSpec],
    rule: VerificationRule,
    device: torch.device,
) -> ModelRunner:
    """Allocate the KV caches, the target's and the drafter's, and bind everything that lives on the device."""
    backend = make_attention_backend(config.attention_backend, device)
    num_rows = config.scheduler.num_rows
    block_tables = BlockTables(len(groups), num_rows, info.max_model_len, info.block_size, device)

    def allocate(group_indices: Sequence[int]) -> dict[int, LayerKVCache]:
        specs = [groups[index] for index in group_indices]
        counts = [info.kv_groups[index].num_blocks for index in group_indices]
        return allocate_caches(specs, counts, info.block_size, loaded.dtype, device)

    num_target_groups = sum(not group.is_drafter for group in groups)
    target_groups = groups[:num_target_groups]
    target_caches = allocate(range(num_target_groups))
    for method in methods:
        speculator = speculators.get(method.name)
        if isinstance(speculator, DraftModelSpeculator):
            indices = method.kv_groups or tuple(range(num_target_groups))
            speculator.bind(
                DraftContext(
                    backend=backend,
                    block_tables=block_tables,
                    group_indices=indices,
                    groups=[groups[index] for index in indices],
                    caches=allocate(indices) if method.has_own_kv else target_caches,
                )
            )
    speculator_set = SpeculatorSet(speculators, loaded.model.vocab_size)
    eager = EagerTarget(
        model=loaded.model,
        backend=backend,
        groups=target_groups,
        caches=target_caches,
        aux_layers=speculator_set.needs.aux_layers,
    )
    captures = make_captures(config, backend, device)
    runner = ModelRunner(
        model=loaded.model,
        target=with_graphs(eager, block_tables, config, info, captures),
        block_tables=block_tables,
        speculators=speculator_set,
        rule=rule,
        num_rows=num_rows,
        max_model_len=info.max_model_len,
        max_drafts=config.max_speculative_tokens,
        device=device,
    )
    if captures:
        init_graphs(runner, eager, speculator_set, methods, config, info, captures)
    prepare_first_steps(runner, methods, info)
    return runner


def _make_rule(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> VerificationRule:
    if config.synthetic_acceptance is not None:
        return SyntheticRule(config.synthetic_acceptance, device)
    if config.verification == "ratio":
        dtype = torch.promote_types(loaded.dtype, torch.float32)  # that of logits
        num_rows, max_drafts = config.scheduler.num_rows, max(config.max_speculative_tokens, 1)
        return RatioRule(DraftDistributions(num_rows, max_drafts, loaded.model.vocab_size, dtype, device))
    return CoupledRule()


def _plan_groups(
    config: EngineConfig,
    model: CausalLM,
    on_device: Mapping[str, BaseSpeculator],
    replayed: Container[str],
) -> tuple[list[DraftMethod], list[KVGroupSpec]]:
    """The loaded methods as the scheduler sees them, and all KV groups: the target's, then a drafter's own."""
    extra_keys = max((speculator.needs.extra_window_keys for speculator in on_device.values()), default=0)
    groups = [
        msgspec.structs.replace(group, extra_window_keys=extra_keys if group.window else 0)
        for group in model.kv_groups()
    ]
    methods = []
    owners = [name for name, speculator in on_device.items() if speculator.needs.draft_kv == "own"]
    if len(owners) > 1:
        names = ", ".join(owners)
        raise ConfigError(
            f"speculators: got {len(owners)} with a KV cache of their own ({names}), expected at most one"
        )
    for item in config.speculators:
        speculator = on_device.get(item.method)
        if speculator is None:
            methods.append(
                DraftMethod(
                    name=item.method, max_drafts=item.k, is_host=True, is_replayed=item.method in replayed
                )
            )
            continue
        own_groups = speculator.kv_groups()
        methods.append(
            DraftMethod(
                name=item.method,
                max_drafts=item.k,
                kv_groups=tuple(range(len(groups), len(groups) + len(own_groups))),
                catch_up=speculator.needs.catch_up,
                is_replayed=item.method in replayed,
                max_context=speculator.max_context,
            )
        )
        groups.extend(msgspec.structs.replace(group, is_drafter=True) for group in own_groups)
    return methods, groups


def _lookups(speculators: Mapping[str, Speculator]) -> dict[str, Callable[[str], LookupReplay]]:
    """What begins a replay, by method."""
    return {name: item.replay for name, item in speculators.items() if isinstance(item, LookupMethod)}


class _CutterFactory:
    """Makes the cutter of a request; loads the tokenizer when the first request with stop strings comes."""

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._tokenizer: Tokenizer | None = None

    def __call__(self, request: AddRequest) -> RequestCutter:
        decoder = None
        if request.params.stop_strings:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(tokenizer_json(self._config.model))
            decoder = IncrementalDecoder(
                self._tokenizer,
                request.prompt_token_ids,
                request.params.skip_special_tokens,
            )
        return RequestCutter(
            request.params,
            self._eos_token_ids,
            len(request.prompt_token_ids),
            self._max_model_len,
            decoder,
        )

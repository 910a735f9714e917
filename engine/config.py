"""Engine configuration: frozen, validated on construction, never mutated. Flags and files are read in server/."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from engine.errors import ConfigError

DTypeName = Literal["auto", "float32", "float16", "bfloat16", "float64"]
VerificationName = Literal["coupled", "ratio"]
CudaGraphsName = Literal["auto", "none", "full_decode", "full"]
NumericsName = Literal["auto", "exact", "fast"]
# normal: matrices like a trained model's, vectors one; uniform: all within 0.001, as in other engines.
DummyWeightsName = Literal["normal", "uniform"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Frozen):
    """Where the checkpoint is and how to read it."""

    model: str  # local directory, .gguf file, or hub id
    served_name: str = ""  # empty: the last path component of `model`
    revision: str | None = None  # hub only
    tokenizer: str | None = None  # directory or hub id; None: where the model is
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    dtype: DTypeName = "auto"
    seed: int = 0  # dummy weights
    dummy_weights: DummyWeightsName = "normal"

    @property
    def name(self) -> str:
        return self.served_name or self.model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


class CacheConfig(_Frozen):
    """The paged KV cache."""

    block_size: int = Field(default=16, ge=1, le=256)  # tokens
    kv_cache_bytes: int | None = Field(default=None, ge=1)  # None: a share of what is free
    memory_fraction: float = Field(default=0.85, gt=0, le=1)  # of device memory; on CPU a quarter of free RAM
    num_blocks: int | None = Field(
        default=None, ge=1
    )  # overrides the budget (tests); of pools without a window
    planned_sequence_length: int = Field(default=8192, ge=1)
    """Tokens of the requests that the budget is shared out for: layers with a window need less of it the longer they
    are. Longer requests fit too, up to max_model_len, but then layers without a window fill up first."""
    enable_prefix_cache: bool = True


class SchedulerConfig(_Frozen):
    """Limits of one step and of the queue."""

    max_num_seqs: int = Field(default=64, ge=1)  # requests that run at once, each in a row of its own
    max_num_batched_tokens: int = Field(default=2048, ge=1)  # per step; a decode counts 1 + k
    max_prefill_chunk: int | None = Field(
        default=None, ge=1
    )  # tokens of one request a step; None: the budget
    max_prefill_stall: float | None = Field(default=0.05, gt=0)
    """Seconds that prefill chunks may add to a step in which other requests decode, by measured speed. None: off."""
    max_waiting: int = Field(default=1024, ge=1)  # requests; beyond: RESOURCE_EXHAUSTED
    check_invariants: bool = False  # integrity checks after every step (tests, debugging)

    @property
    def num_rows(self) -> int:
        """Of whatever is kept by row on the device: the last one is nobody's, and pads captured steps."""
        return self.max_num_seqs + 1


class SpeculatorConfig(_Frozen):
    """One draft method to load. `k` is num_speculative_tokens: the default and the most a request may ask."""

    method: str
    model: str | None = None
    k: int = Field(default=3, ge=1, le=16)
    options: dict[str, str] = {}


class EngineConfig(_Frozen):
    """Everything the engine process needs; travels as JSON."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculators: tuple[SpeculatorConfig, ...] = ()
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    max_model_len: int | None = Field(default=None, ge=1)  # caps the checkpoint's own limit
    max_steps_in_flight: Literal[1, 2] | None = None  # None: 2 where launches are asynchronous, else 1
    attention_backend: str = "auto"
    cuda_graphs: CudaGraphsName = "auto"
    """full_decode: steps that only decode are replayed; full: steps with prompt chunks too; auto: full, if possible."""
    numerics: NumericsName = "auto"
    """exact: a request's tokens depend neither on drafts, nor on neighbours, chunks, preemption or cached prefixes;
    CUDA only. fast: bits may differ between batches, so that a near tie may turn out differently. auto: exact where
    device and model allow it."""
    num_threads: int | None = Field(default=None, ge=1)  # CPU only; None: torch's choice
    profile_directory: str | None = None  # where traces of steps may be written; None: nowhere
    draft_policy: str = "auto"
    """What a request gets that names no draft method: "auto", "first" (of those loaded), "none", or a loaded method."""
    verification: VerificationName = "coupled"
    """coupled: the tokens of plain decoding. ratio: their distribution only, with somewhat more drafts accepted."""
    allow_synthetic: bool = False
    synthetic_acceptance: tuple[float, ...] | None = None
    """Benchmarks only: rate at which draft i is accepted, given that all before it were, whatever the target says."""

    @field_validator("speculators")
    @classmethod
    def _check_distinct(cls, speculators: tuple[SpeculatorConfig, ...]) -> tuple[SpeculatorConfig, ...]:
        methods = [speculator.method for speculator in speculators]
        if len(set(methods)) < len(methods):
            raise ValueError(
                f"got {', '.join(methods)}, expected each method once: a request chooses by its name"
            )
        return speculators

    @field_validator("draft_policy")
    @classmethod
    def _check_policy(cls, policy: str, info: ValidationInfo) -> str:
        if "speculators" not in info.data:  # they are wrong themselves
            return policy
        methods = [speculator.method for speculator in info.data["speculators"]]
        known = ("auto", "first", "none", *methods)
        if policy not in known:
            loaded = "" if methods else " (no draft method is loaded)"
            raise ValueError(f"expected one of {', '.join(map(repr, known))}{loaded}")
        return policy

    @field_validator("synthetic_acceptance")
    @classmethod
    def _check_synthetic(
        cls, rates: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        if rates is None:
            return rates
        if not info.data.get("allow_synthetic"):
            raise ValueError("the text would not be the model's, expected allow_synthetic with it")
        if info.data.get("verification") != "coupled":
            raise ValueError("it replaces the verification, expected verification 'coupled' with it")
        k = max((speculator.k for speculator in info.data.get("speculators", ())), default=1)
        if len(rates) < k:
            raise ValueError(f"expected a rate for each of {k} drafts")
        if not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ValueError("expected rates from 0 to 1")
        return rates

    @property
    def default_speculator(self) -> str:
        """What stands for the method that a request leaves unset: a loaded method, "auto" or "none"."""
        if not self.speculators:
            return "none"
        return self.speculators[0].method if self.draft_policy == "first" else self.draft_policy

    @property
    def max_speculative_tokens(self) -> int:
        return max((speculator.k for speculator in self.speculators), default=0)


def engine_config(**values: object) -> EngineConfig:
    """Build an EngineConfig; raise ConfigError naming the field, what was got and what is expected."""
    try:
        return EngineConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error)) from None


def describe_validation_error(error: ValidationError) -> str:
    """One line per wrong field: path, what is expected, what was got."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "configuration"
        is_unknown = item["type"] == "extra_forbidden"
        wrong = "there is no such setting" if is_unknown else item["msg"].removeprefix("Value error, ")
        got = "" if wrong.startswith("got ") else f", got {item['input']!r}"
        lines.append(f"{path}: {wrong}{got}")
    return "; ".join(lines)

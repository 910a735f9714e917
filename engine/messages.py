"""What frontend and engine say to each other: msgspec data, encoded as msgpack on the socket.

One `StepMessage` a step carries the outputs of all its requests. Token ids in a `RequestOutput` are already
cut (engine/finish.py): the frontend renders them, it never cuts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.control import AnyAction, AnyResult
from engine.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestIdInUseError,
)
from engine.kv_spec import KVGroupUsage
from engine.params import Constraint, SamplingParams, SpeculationParams
from engine.stats import EngineStats, SpecObservation, StepStats

FinishReason = Literal["stop", "length", "cancelled", "error"]


# ---- frontend -> engine ------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a frontend. Answered by LoadProgress while the engine loads, then by ModelInfo."""


class AddRequest(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """Start a request. `request_id` is unique among live requests of the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    speculation: SpeculationParams = SpeculationParams()
    constraint: Constraint | None = None
    priority: int = 0  # lower = sooner
    cache_salt: str = ""  # requests share prefix blocks only within one salt
    tenant: str = ""  # waiting requests of different tenants take turns
    arrival_time: float = 0.0  # time.monotonic() of the frontend; one machine, one clock


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    """End these requests. Unknown and finished ids are ignored: aborting is idempotent."""

    request_ids: list[str]


class Control(msgspec.Struct, tag=True, frozen=True):
    """Answered by ControlAnswer or RequestRefused with this id, which is unique like those of requests."""

    control_id: str
    action: AnyAction


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Stop the loop; whatever still runs ends as cancelled."""


ToEngine = Hello | AddRequest | AbortRequests | Control | Shutdown


# ---- engine -> frontend ------------------------------------------------------------------------------------


class ModelInfo(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """Sent when the engine is ready to serve, and again when a default in it has changed."""

    model_name: str  # served name
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int  # of all groups; behind its window a token costs a group with a window nothing
    kv_cache_bytes: int
    num_blocks: int  # of the largest group: of one without a window, if there is one
    kv_groups: tuple[KVGroupUsage, ...] = ()
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_steps_in_flight: int
    numerics: str = "fast"  # or "exact": EngineConfig.numerics, as it turned out
    speculators: tuple[str, ...] = ()  # methods that are loaded, registry names
    default_speculator: str = "none"
    synthetic_acceptance: tuple[
        float, ...
    ] = ()  # not empty: drafts are accepted at these rates; benchmarks only
    startup_seconds: dict[str, float] = {}  # phase -> seconds


class LoadProgress(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """While the engine starts. `fraction` of the phase, 0..1."""

    phase: str
    fraction: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability under the raw target distribution; rank 1 = most likely."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(msgspec.Struct, frozen=True):
    """One position: the token that is there, and the N most likely ones (by rank)."""

    token: TokenLogprob
    top: list[TokenLogprob]


class FinishInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Why a request ended. At most one cause is set, and only with reason `stop`."""

    reason: FinishReason
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    is_constraint_met: bool = False  # nothing can follow that the constraint allows
    message: str = ""  # for `error`: safe to show
    field: str = ""  # for `error`: what of the request is wrong; empty: it is not the request
    num_chars_to_drop: int = 0  # characters to remove from the end of the rendered text
    drop_last_token_text: bool = False  # the last id is an end or stop token whose text is not shown


class RequestTimes(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """time.monotonic() stamps of one machine, seconds; 0 where it has not happened."""

    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


class RequestOutput(msgspec.Struct, kw_only=True, gc=False):
    """What one or more steps brought for one request: deltas, except where said."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None  # one per token id, if asked
    num_prompt_tokens: int = 0  # total
    num_cached_tokens: int = 0  # total: prompt tokens found in the prefix cache when first scheduled
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # whole prompt, once; entry 0 is None
    finish: FinishInfo | None = None
    spec: list[SpecObservation] = []
    num_preemptions: int = 0  # total
    times: RequestTimes = RequestTimes()


class StepMessage(msgspec.Struct, tag=True, kw_only=True):
    """All that one step (or an abort between steps) brought."""

    outputs: list[RequestOutput]
    stats: EngineStats
    step: StepStats | None = None


class RequestRefused(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """The engine did not take this request or Control; nothing was started, and there is no output."""

    request_id: str  # or control_id
    error: str  # class name of the EngineError
    message: str
    field: str = ""  # InvalidRequestError
    retry_after: float = 0.0  # QueueFullError; seconds

    @classmethod
    def from_error(cls, request_id: str, error: EngineError) -> RequestRefused:
        return cls(
            request_id=request_id,
            error=type(error).__name__,
            message=error.description if isinstance(error, InvalidRequestError) else str(error),
            field=error.field if isinstance(error, InvalidRequestError) else "",
            retry_after=error.retry_after if isinstance(error, QueueFullError) else 0.0,
        )

    def to_error(self) -> EngineError:
        match self.error:
            case "QueueFullError":
                return QueueFullError(self.message, self.retry_after)
            case "RequestIdInUseError":
                return RequestIdInUseError(self.request_id)
            case "InvalidRequestError":
                return InvalidRequestError(self.field, self.message)
            case _:
                return RequestFailedError(self.message)


class ControlAnswer(msgspec.Struct, tag=True, frozen=True):
    """What came of a Control."""

    control_id: str
    result: AnyResult


class EngineFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start or go on. `message` goes to the log; clients get UNAVAILABLE."""

    error: str  # class name of the EngineError, or "internal"
    message: str

    def to_error(self) -> EngineError:
        classes: dict[str, type[EngineError]] = {
            known.__name__: known for known in (ConfigError, CheckpointError)
        }
        return classes.get(self.error, EngineUnavailableError)(self.message)


FromEngine = ModelInfo | LoadProgress | StepMessage | RequestRefused | ControlAnswer | EngineFailed

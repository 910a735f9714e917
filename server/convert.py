"""From a protocol request to engine requests, checked field by field.

Every field is supported or refused: unset (explicit presence) is a default, 0 is a value, and what this
server does not know is an error. Knows nothing of streams; server/choice.py makes the way back.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from google.protobuf.message import Message

from engine.errors import InvalidRequestError, PermissionDeniedError, UnknownModelError
from engine.messages import AddRequest, ModelInfo
from engine.params import (
    MAX_CHOICES,
    Constraint,
    SamplingParams,
    SpeculationParams,
    validate_token_ids,
)
from server.callers import ANYBODY, Caller
from server.fields import check_fields
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.text import TextProcessor

MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 128
MAX_BAD_WORD_CHARS = 256
MAX_QUOTED_CHARS = 120  # of a name that the client chose: a status has room for what was expected, too
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_PARAMETER_GROUPS: dict[str, type[Message]] = {
    "sampling": pb.SamplingParams,
    "stopping": pb.StoppingParams,
    "output": pb.OutputParams,
}


@dataclass(frozen=True)
class GenerationPlan:
    """A request, ready for the engine."""

    requests: tuple[AddRequest, ...]  # one per choice
    stream_interval: int  # tokens
    wants_text: bool


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The part of a checkpoint's generation_config.json that is the default of a sampling field here."""
    values = {name: generation_config.get(name) for name in _SAMPLING_DEFAULTS}
    return {name: value for name, value in values.items() if value is not None}


def choice_seed(seed: int, index: int) -> int:
    """Seed of a choice: choice 0 has the request's own, the others a hash that is the same everywhere."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<qI", seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def choice_ids(request_id: str, num_choices: int) -> tuple[str, ...]:
    """Ids of a request's choices in the engine; `request_id` is scoped to its tenant."""
    return (request_id, *(f"{request_id}#{i}" for i in range(1, num_choices)))


class RequestConverter:
    """One served model: its vocabulary, context, tokenizer, sampling defaults and draft methods."""

    def __init__(
        self,
        model: ModelInfo,
        text: TextProcessor,
        *,
        sampling_defaults: Mapping[str, float],
        speculator_limits: Mapping[str, int],  # method -> the largest k
        max_prompt_tokens: int | None = None,
        default_speculator: Callable[[], str] | None = None,  # of this moment; None: the model's
    ) -> None:
        self._model = model
        self._text = text
        self._sampling_defaults = dict(sampling_defaults)
        self._speculator_limits = dict(speculator_limits)
        self._max_prompt_tokens = model.max_model_len - 1
        if max_prompt_tokens is not None:
            self._max_prompt_tokens = min(self._max_prompt_tokens, max_prompt_tokens)
        self._default_speculator = default_speculator or (lambda: model.default_speculator)

    @property
    def max_prompt_tokens(self) -> int:
        """What leaves a token of the context to generate, or the limit of this server."""
        return self._max_prompt_tokens

    async def plan(
        self,
        request: pb.GenerateRequest,
        engine_ids: tuple[str, ...],
        arrival_time: float,
        caller: Caller = ANYBODY,
    ) -> GenerationPlan:
        """Raise InvalidRequestError, whose field is a path in the request, UnknownModelError or
        PermissionDeniedError.

        `engine_ids` are those of `choice_ids`; `arrival_time` is of time.monotonic().
        """
        self._check_served(request)
        if caller.min_priority is not None and request.priority < caller.min_priority:
            raise PermissionDeniedError(
                f"priority: got {request.priority}, expected at least {caller.min_priority} with this token"
            )
        interval = request.output.stream_interval if request.output.HasField("stream_interval") else 1
        if interval < 1:
            raise InvalidRequestError("output.stream_interval", "got 0, expected >= 1")
        speculation, constraint = self._speculation(request.speculation), read_constraint(request)
        self._check_sizes(request.sampling)
        prompt = await self._prompt(request)
        bad_words = await self._text.encode_words(request.sampling.bad_words)
        params = self._params(request, bad_words, room=self._model.max_model_len - len(prompt))
        requests = tuple(
            AddRequest(
                request_id=engine_id,
                prompt_token_ids=prompt,
                params=params
                if i == 0
                else msgspec.structs.replace(params, seed=choice_seed(params.seed, i)),
                speculation=speculation,
                constraint=constraint,
                priority=request.priority,
                cache_salt=caller.scoped(request.cache_salt),
                tenant=caller.tenant,
                arrival_time=arrival_time,
            )
            for i, engine_id in enumerate(engine_ids)
        )
        wants_text = request.output.text if request.output.HasField("text") else True
        return GenerationPlan(requests, stream_interval=interval, wants_text=wants_text)

    def _check_served(self, request: pb.GenerateRequest) -> None:
        if request.HasField("model") and request.model != self._model.model_name:
            raise UnknownModelError(
                f"got model {request.model[:MAX_QUOTED_CHARS]!r}, "
                f"expected {self._model.model_name!r} (served here) or none"
            )
        if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidRequestError(
                "cache_salt",
                f"got {len(request.cache_salt)} characters, expected at most {MAX_CACHE_SALT_CHARS}",
            )

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        kind, limit = request.WhichOneof("prompt"), self._max_prompt_tokens
        match kind:
            case None:
                raise InvalidRequestError("prompt", "is unset, expected text, token_ids or chat")
            case "text":
                prompt = await self._text.encode(request.text, max_tokens=limit) if request.text else []
            case "token_ids":
                self._check_length("token_ids", len(request.token_ids.ids))  # before anything looks at them
                prompt = list(request.token_ids.ids)
                validate_token_ids("token_ids.ids", prompt, self._model.vocab_size)
            case "chat":
                _, prompt = await self._text.encode_chat(request.chat, max_tokens=limit)
        self._check_length(kind, len(prompt))
        return prompt

    def _check_length(self, field: str, num_tokens: int) -> None:
        """A prompt has a token, leaves one of the context to generate, and is no longer than the server takes."""
        limit = self._max_prompt_tokens
        if not 1 <= num_tokens <= limit:
            is_context = limit == self._model.max_model_len - 1
            raise InvalidRequestError(
                field,
                f"got a prompt of {num_tokens} tokens, expected 1..{limit}: "
                + ("the context less one" if is_context else "the limit of this server"),
            )

    def _params(
        self, request: pb.GenerateRequest, bad_words: tuple[tuple[int, ...], ...], room: int
    ) -> SamplingParams:
        sampling, stopping, output = request.sampling, request.stopping, request.output
        values: dict[str, Any] = {"max_tokens": room, "seed": secrets.randbits(63), **self._sampling_defaults}
        for group in (sampling, stopping, output):
            for descriptor, value in group.ListFields():
                if descriptor.name in SamplingParams.__struct_fields__ and not descriptor.is_repeated:
                    values[descriptor.name] = value
        params = SamplingParams(
            **values
            | {
                "logit_bias": dict(sampling.logit_bias),
                "bad_words": bad_words,
                "allowed_token_ids": tuple(sampling.allowed_token_ids),
                "stop_strings": tuple(stopping.stop),
                "stop_token_ids": tuple(stopping.stop_token_ids),
            }
        )
        try:
            params.validate(self._model.vocab_size)
        except InvalidRequestError as error:
            raise InvalidRequestError(_path_of(error.field), error.description) from None
        return msgspec.structs.replace(
            params,
            max_tokens=min(
                params.max_tokens, room
            ),  # the context ends the output anyway, with the same reason
            min_tokens=min(params.min_tokens, room),
            top_k=min(params.top_k, self._model.vocab_size),
        )

    def _check_sizes(self, sampling: pb.SamplingParams) -> None:
        """What would be costly to look at; SamplingParams.validate checks the rest."""
        for word in sampling.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
                raise InvalidRequestError(
                    "sampling.bad_words",
                    f"got a word of {len(word)} characters, expected 1..{MAX_BAD_WORD_CHARS}",
                )
        num_allowed = len(sampling.allowed_token_ids)
        if num_allowed > self._model.vocab_size:
            raise InvalidRequestError(
                "sampling.allowed_token_ids",
                f"got {num_allowed} ids, expected at most {self._model.vocab_size}, the vocabulary",
            )

    def _speculation(self, speculation: pb.SpeculationParams) -> SpeculationParams:
        method = speculation.method if speculation.HasField("method") else None
        loaded = self._model.speculators
        if method is not None and method not in (*loaded, "auto", "none"):
            expected = ", ".join(map(repr, (*loaded, "auto", "none")))
            raise InvalidRequestError(
                "speculation.method", f"got {method[:MAX_QUOTED_CHARS]!r}, expected one of {expected}"
            )
        if not speculation.HasField("num_speculative_tokens"):
            return SpeculationParams(method=method)
        num_tokens, limit = speculation.num_speculative_tokens, self._speculation_limit(method)
        if num_tokens > limit:
            raise InvalidRequestError(
                "speculation.num_speculative_tokens",
                f"got {num_tokens}, expected at most {limit} with method {method or 'unset'}"
                + ("" if loaded else ": no draft method is loaded"),
            )
        return SpeculationParams(method=method if num_tokens else "none", num_speculative_tokens=num_tokens)

    def _speculation_limit(self, method: str | None) -> int:
        method = method or self._default_speculator()
        if method == "auto":
            return max(self._speculator_limits.values(), default=0)
        return self._speculator_limits.get(method, 0)


def read_identity(request: pb.GenerateRequest) -> tuple[str, int]:
    """Request id (drawn if unset) and number of choices. Refuses what the protocol has no field for."""
    check_fields(request)
    num_choices = request.n if request.HasField("n") else 1
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidRequestError("n", f"got {num_choices}, expected 1..{MAX_CHOICES}")
    if not request.HasField("request_id"):
        return f"req-{secrets.token_hex(8)}", num_choices
    request_id = request.request_id
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS or not all(" " <= char <= "~" for char in request_id):
        raise InvalidRequestError(
            "request_id",
            f"got {request_id[:MAX_QUOTED_CHARS]!r}, expected 1..{MAX_REQUEST_ID_CHARS} printable ASCII characters",
        )
    return request_id, num_choices


def read_constraint(request: pb.GenerateRequest) -> Constraint | None:
    """What the text of a schema, an expression or a grammar says is the engine's matter."""
    match request.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            constraint = Constraint(kind="json_object")
        case "choice":
            constraint = Constraint(kind="choice", choices=tuple(request.choice.choices))
        case kind:
            constraint = Constraint(kind=kind, text=getattr(request, kind))
    constraint.validate()
    return constraint


def _path_of(parameter: str) -> str:
    """Example: temperature -> sampling.temperature; logit_bias[5] -> sampling.logit_bias[5]."""
    name = parameter.partition("[")[0]
    for group, message in _PARAMETER_GROUPS.items():
        if name in message.DESCRIPTOR.fields_by_name:
            return f"{group}.{parameter}"
    return parameter

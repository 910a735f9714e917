"""From a request of the vLLM engine protocol to one of ours.

Every field of theirs is translated or refused, like every field of ours. A scalar without presence means "off" or
"unset" where it is 0: the gateway has put the checkpoint's own defaults in already. Bounds are checked by
server/convert.py; `gateway_field` gives its complaints the names that the gateway knows.
"""

from __future__ import annotations

from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from engine.errors import InvalidRequestError
from server.fields import check_fields
from server.pb.slipstream.v1 import generation_pb2 as pb

WHOLE_ANSWER = 2**31  # tokens between two deltas: more than there are
_REQUEST_FIELDS = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream"})
_RENAMED = {
    "token_ids": "tokenized.input_ids",
    "token_ids.ids": "tokenized.input_ids",
    "stopping.include_stop": "sampling_params.include_stop_str_in_output",
    "n": "sampling_params.n",
}
_CONSTRAINTS = frozenset(
    field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["constraint"].fields
)
_SAMPLING_GROUPS = ("sampling", "stopping", "output")


def to_request(request: vllm.GenerateRequest, *, wants_text: bool = False) -> pb.GenerateRequest:
    """Raises InvalidRequestError for what has no meaning here. `wants_text`: render it, though nobody is sent it."""
    check_fields(request)
    for descriptor, _ in request.ListFields():
        if descriptor.name not in _REQUEST_FIELDS:
            raise InvalidRequestError(descriptor.name, "is set, expected unset: not supported by this server")
    params = request.sampling_params
    converted = pb.GenerateRequest(
        request_id=request.request_id or None,
        sampling=_sampling(params),
        stopping=_stopping(params),
        output=_output(params, wants_text=wants_text, is_streamed=request.stream),
        n=params.n or 1,
    )
    _set_prompt(converted, request)
    _set_constraint(converted, params)
    return converted


def gateway_field(field: str) -> str:
    """Example: sampling.top_p -> sampling_params.top_p."""
    group, _, name = field.partition(".")
    if field in _RENAMED:
        return _RENAMED[field]
    if group in _SAMPLING_GROUPS:
        return f"sampling_params.{name}"
    if group in _CONSTRAINTS:
        return f"sampling_params.{field}"
    return field


def _set_prompt(converted: pb.GenerateRequest, request: vllm.GenerateRequest) -> None:
    match request.WhichOneof("input"):
        case "tokenized":  # its original_text is there to be read by people
            converted.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            converted.text = request.text
            if request.sampling_params.HasField("prompt_logprobs"):
                # Their answer repeats the ids of the prompt, which only a tokenized one has from the start.
                raise InvalidRequestError(
                    "sampling_params.prompt_logprobs", "is set with a text, expected a tokenized input"
                )
        case _:
            raise InvalidRequestError("input", "is unset, expected tokenized or text")


def _sampling(params: vllm.SamplingParams) -> pb.SamplingParams:
    negative = [token_id for token_id in params.logit_bias if token_id < 0]
    if negative:
        raise InvalidRequestError(
            "sampling_params.logit_bias", f"got token id {negative[0]}, expected at least 0"
        )
    return pb.SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=_optional(params, "seed"),
    )


def _stopping(params: vllm.SamplingParams) -> pb.StoppingParams:
    return pb.StoppingParams(
        max_tokens=_optional(params, "max_tokens"),
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        include_stop=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
    )


def _output(params: vllm.SamplingParams, *, wants_text: bool, is_streamed: bool) -> pb.OutputParams:
    """`spaces_between_special_tokens` concerns only text, which the gateway makes."""
    if params.HasField("truncate_prompt_tokens"):
        raise InvalidRequestError(
            "sampling_params.truncate_prompt_tokens", "is set, expected unset: prompts are not cut here"
        )
    for field in ("logprobs", "prompt_logprobs"):
        if params.HasField(field) and getattr(params, field) < 0:
            raise InvalidRequestError(
                f"sampling_params.{field}", f"got {getattr(params, field)}, expected a number of tokens"
            )
    return pb.OutputParams(
        logprobs=_optional(params, "logprobs"),
        prompt_logprobs=_optional(params, "prompt_logprobs"),
        stream_interval=1 if is_streamed else WHOLE_ANSWER,
        skip_special_tokens=params.skip_special_tokens,
        text=wants_text,
    )


def _set_constraint(converted: pb.GenerateRequest, params: vllm.SamplingParams) -> None:
    """A grammar holds from the first token on here in any case: `grammar_from_first_token` asks for nothing new."""
    kind = params.WhichOneof("constraint")
    if kind is None:
        return
    if kind not in _CONSTRAINTS:
        raise InvalidRequestError(f"sampling_params.{kind}", "is set, expected unset: not supported here")
    match kind:
        case "choice":
            converted.choice.choices.extend(params.choice.choices)
        case "json_object":
            if params.json_object:
                converted.json_object.SetInParent()
        case _:
            setattr(converted, kind, getattr(params, kind))


def _optional(params: vllm.SamplingParams, field: str) -> Any:
    """None where it is unset."""
    return getattr(params, field) if params.HasField(field) else None

"""Chat messages of the protocol as the plain data that a chat template reads, checked field by field.

Knows the shape of a conversation, not what a template makes of it (server/text.py renders).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from google.protobuf import struct_pb2

from engine.errors import InvalidRequestError
from server.pb.slipstream.v1 import generation_pb2 as pb

# What a role may look like. A template writes it next to its control tokens, so nothing else may pass.
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
MAX_TOOL_CALLS = 10_000  # of all messages together
# Of tools, tool_calls and template_arguments together, as encoded: millions of values would fit into a request.
MAX_FREE_FORM_BYTES = 2**20
# A Struct keeps no order, and every process reads the same bytes in another: templates print these first, as models
# saw them in training, then the rest by name. So a request is the same prompt in every process.
_FIRST_NAMES = ("id", "type", "function", "name", "description", "parameters", "arguments", "properties")
_RANKS = {name: rank for rank, name in enumerate(_FIRST_NAMES)}


@dataclass(frozen=True)
class Conversation:
    """The arguments of a chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    template_arguments: dict[str, Any]


def read_conversation(chat: pb.ChatPrompt, reserved_arguments: Collection[str]) -> Conversation:
    """Raise InvalidRequestError for what no template could render.

    `reserved_arguments` are names that a template argument may not take.
    """
    if not chat.messages:
        raise InvalidRequestError("chat.messages", "got none, expected at least one")
    _check_free_form(chat)
    arguments = _plain(chat.template_arguments)
    for name in arguments:
        if name in reserved_arguments:
            field = f"chat.template_arguments.{name}"
            raise InvalidRequestError(field, "is set by the server, expected another name")
    return Conversation(
        messages=[_read_message(message, i) for i, message in enumerate(chat.messages)],
        tools=[_plain(tool) for tool in chat.tools] or None,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        template_arguments=arguments,
    )


def _check_free_form(chat: pb.ChatPrompt) -> None:
    num_calls = sum(len(message.tool_calls) for message in chat.messages)
    if num_calls > MAX_TOOL_CALLS:
        raise InvalidRequestError(
            "chat.messages", f"got {num_calls} tool_calls, expected at most {MAX_TOOL_CALLS}"
        )
    calls = (call for message in chat.messages for call in message.tool_calls)
    num_bytes = sum(part.ByteSize() for part in (chat.template_arguments, *chat.tools, *calls))
    if num_bytes > MAX_FREE_FORM_BYTES:
        raise InvalidRequestError(
            "chat",
            f"got {num_bytes} bytes of tools, tool_calls and template_arguments, "
            f"expected at most {MAX_FREE_FORM_BYTES}",
        )


def _read_message(message: pb.ChatMessage, index: int) -> dict[str, Any]:
    path = f"chat.messages[{index}]"
    if not _ROLE.fullmatch(message.role):
        expected = "expected a name such as system, user, assistant or tool"
        raise InvalidRequestError(f"{path}.role", f"got {message.role[:80]!r}, {expected}")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequestError(
            f"{path}.tool_calls", f"got some with role {message.role!r}, expected assistant"
        )
    if not message.HasField("content") and not message.tool_calls:
        raise InvalidRequestError(
            f"{path}.content", "is unset, expected text (or tool_calls of an assistant)"
        )
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id"):
        if message.HasField(name):
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [_plain(call) for call in message.tool_calls]
    return plain


def _plain(struct: struct_pb2.Struct) -> dict[str, Any]:
    return {name: _plain_value(struct.fields[name]) for name in sorted(struct.fields, key=_order)}


def _order(name: str) -> tuple[int, str]:
    return _RANKS.get(name, len(_RANKS)), name


def _plain_value(value: struct_pb2.Value) -> Any:
    """JSON numbers are doubles; whole ones become ints, so that a template prints 1 and not 1.0."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return _plain(value.struct_value)
        case "list_value":
            return [_plain_value(item) for item in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None

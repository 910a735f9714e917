"""What is checked of every request message before anything else reads it: no list is longer than the protocol says, and
no field is one that this server does not know.

A message of 16 MiB can hold millions of entries or fields, and this runs on the event loop: nothing here takes a Python
step for each of them.
"""

from __future__ import annotations

from google.protobuf import struct_pb2
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from engine.errors import InvalidRequestError
from engine.params import (
    MAX_BAD_WORDS,
    MAX_CONSTRAINT_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

# By the name of the field, which means the same in every protocol here. Lists inside of lists are checked by whoever
# reads the outer one.
MAX_ENTRIES = {
    "ids": 4_000_000,  # these three are more than any model takes, whose own limit is checked later
    "input_ids": 4_000_000,
    "allowed_token_ids": 1_000_000,
    "messages": 10_000,
    "tools": 1024,
    "logit_bias": MAX_LOGIT_BIAS,
    "bad_words": MAX_BAD_WORDS,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "choices": MAX_CONSTRAINT_CHOICES,
    "request_ids": 1024,
    "token_ids": 1_000_000,
    "speculators": 64,
}
_FREE_FORM = struct_pb2.Struct.DESCRIPTOR.full_name
_MAX_NAMED_BYTES = 65_536  # of a message in which an unknown field is looked for, to name it


def check_fields(message: Message) -> None:
    """Raises InvalidRequestError, whose field is a path in the message."""
    _check_lists(message, "")
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() != message.ByteSize():
        raise _unknown(message)


def _check_lists(message: Message, path: str) -> None:
    for descriptor, value in message.ListFields():
        field = path + descriptor.name
        if descriptor.is_repeated:
            limit = MAX_ENTRIES.get(descriptor.name)
            if limit is not None and len(value) > limit:
                raise InvalidRequestError(field, f"got {len(value)} entries, expected at most {limit}")
        elif descriptor.message_type is not None:
            _check_lists(value, f"{field}.")


def _unknown(message: Message) -> InvalidRequestError:
    """A newer client asks for something that this server would otherwise ignore."""
    found = _find_unknown(message, "") if message.ByteSize() <= _MAX_NAMED_BYTES else None
    if found is None:
        return InvalidRequestError("request", "got a field that this server does not know")
    path, number = found
    return InvalidRequestError(path, f"got field number {number}, which this server does not know")


def _find_unknown(message: Message, path: str) -> tuple[str, int] | None:
    """Path of the message that holds it, and its number. None: it is in a map or in free-form data."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return path.removesuffix(".") or "request", unknown[0].field_number
    for descriptor, value in message.ListFields():
        kind = descriptor.message_type
        if kind is None or kind.GetOptions().map_entry or kind.full_name == _FREE_FORM:
            continue
        name = f"{path}{descriptor.name}"
        items = (
            [(f"{name}[{i}].", item) for i, item in enumerate(value)]
            if descriptor.is_repeated
            else [(f"{name}.", value)]
        )
        for item_path, item in items:
            if (found := _find_unknown(item, item_path)) is not None:
                return found
    return None

"""Random messages of any type, made from its descriptor: numbers at the edges of their type, texts of every script,
NaN, unset fields, huge lists. Knows no service.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory, struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_MAX_DEPTH = 3
_MAX_FIELDS = st.sampled_from((1, 1, 2, 5))  # that are set in one message
_LARGE = 3000  # entries of a large list, characters of a long text: more than most limits
_WORDS = (
    "",
    "none",
    "auto",
    "ngram",
    "tiny",
    "r",
    "user",
    "\0",
    "{}",
    "[a-z]+",
    '{"type": "string"}',
    "(" * 50,
)
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message with a few random fields set to random values."""
    if descriptor.full_name == struct_pb2.Struct.DESCRIPTOR.full_name:
        struct = struct_pb2.Struct()
        struct.update(draw(st.dictionaries(st.text(max_size=5), _JSON, max_size=3)))
        return struct
    message = message_factory.GetMessageClass(descriptor)()
    fields = [field for field in descriptor.fields if field.message_type is None or depth < _MAX_DEPTH]
    if fields:
        for field in draw(st.lists(st.sampled_from(fields), max_size=draw(_MAX_FIELDS), unique=True)):
            _set(draw, message, field, depth)
    return message


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        entries = draw(st.dictionaries(_scalars(key), _values(value, depth), max_size=3))
        if value.message_type is None:
            getattr(message, field.name).update(entries)
        else:
            for name, entry in entries.items():
                getattr(message, field.name)[name].CopyFrom(entry)
    elif field.is_repeated:
        values = draw(st.lists(_values(field, depth), max_size=3))
        times = draw(st.sampled_from((1, 1, 1, _LARGE)))
        getattr(message, field.name).extend(values * times)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        getattr(message, field.name).CopyFrom(draw(_values(field, depth)))
    else:
        setattr(message, field.name, draw(_scalars(field)))


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """Of one entry of the field."""
    return _scalars(field) if field.message_type is None else messages(field.message_type, depth + 1)


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            return st.sampled_from(sorted(field.enum_type.values_by_number)) | st.integers(
                -(2**31), 2**31 - 1
            )
        case FieldDescriptor.CPPTYPE_FLOAT:
            return st.sampled_from((0.0, 0.5, 1.0)) | st.floats(width=32)
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return st.sampled_from((0.0, 0.5, 1.0)) | st.floats()
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=50)
        case FieldDescriptor.CPPTYPE_STRING:
            return st.sampled_from((*_WORDS, "x" * _LARGE)) | st.text(max_size=30)
        case kind:
            low, high = _INTEGERS[kind]
            edges = [edge for edge in (low, high, 0, 1, 2, 64, 319, 320, 1024) if low <= edge <= high]
            return st.sampled_from(edges) | st.integers(low, high)


@st.composite
def mutations(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes that are almost a message: cut, flipped, repeated, with bytes in between; or none of it."""
    match draw(st.integers(0, 4)):
        case 0:
            return draw(st.binary(max_size=200))
        case 1:
            return whole[: draw(st.integers(0, len(whole)))]
        case 2 if whole:
            changed = bytearray(whole)
            for position in draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
                changed[position] = draw(st.integers(0, 255))
            return bytes(changed)
        case 3:
            position = draw(st.integers(0, len(whole)))
            return whole[:position] + draw(st.binary(min_size=1, max_size=20)) + whole[position:]
        case _:
            return whole * draw(st.integers(2, 5)) + draw(st.binary(min_size=1, max_size=5))

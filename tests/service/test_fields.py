"""Before a request is read: every list has a bound, unknown fields are refused, and both take no step per entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2
from google.protobuf.descriptor import Descriptor, ServiceDescriptor

from engine.errors import InvalidRequestError
from server import fields
from server.chat import MAX_FREE_FORM_BYTES, MAX_TOOL_CALLS
from server.fields import MAX_ENTRIES, check_fields
from server.pb.slipstream.v1 import admin_pb2
from server.pb.slipstream.v1 import generation_pb2 as pb
from tests.support.server_fixture import failure_of, running_server

UNKNOWN = b"\xf8\x3f\x01"  # field 1023, varint 1
SERVICES = (
    pb.DESCRIPTOR.services_by_name["GenerationService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
)
FREE_FORM = struct_pb2.Struct.DESCRIPTOR.full_name  # bounded in bytes, with what is in it
INSIDE_OF_LISTS = {"tool_calls"}


def repeated_fields(descriptor: Descriptor) -> Iterator[str]:
    for field in descriptor.fields:
        if field.is_repeated:
            yield field.name
        inner = field.message_type
        if inner is not None and inner.full_name != FREE_FORM and not inner.GetOptions().map_entry:
            yield from repeated_fields(inner)


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_every_list_of_a_request_has_a_bound(service: ServiceDescriptor) -> None:
    names = {name for method in service.methods for name in repeated_fields(method.input_type)}
    assert names - MAX_ENTRIES.keys() == (INSIDE_OF_LISTS if "messages" in names else set())


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 10_001)), "chat.messages"),
        (pb.GenerateRequest(chat=pb.ChatPrompt(tools=[struct_pb2.Struct()] * 1025)), "chat.tools"),
        (
            pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 0.0))),
            "sampling.logit_bias",
        ),
        (pb.AbortRequest(request_ids=["r"] * 1025), "request_ids"),
        (pb.DetokenizeRequest(token_ids=[5] * 1_000_001), "token_ids"),
        (
            admin_pb2.ConfigureSpeculationRequest(speculators=[admin_pb2.SpeculatorSettings()] * 65),
            "speculators",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_list_that_is_too_long_is_named_with_its_bound(message: Any, field: str) -> None:
    limit = MAX_ENTRIES[field.rpartition(".")[2]]
    with pytest.raises(
        InvalidRequestError, match=f"got {limit + 1} entries, expected at most {limit}"
    ) as error:
        check_fields(message)
    assert error.value.field == field


def test_a_large_message_is_not_searched_for_the_field_that_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def search(*arguments: object) -> None:
        raise AssertionError("a message can hold millions of unknown fields")

    monkeypatch.setattr(fields, "UnknownFieldSet", search)
    check_fields(pb.GenerateRequest(text="x"))
    request = pb.GenerateRequest.FromString(UNKNOWN * 100_000)
    with pytest.raises(InvalidRequestError, match="got a field that this server does not know"):
        check_fields(request)


def test_an_unknown_field_in_free_form_data_is_refused() -> None:
    tool = struct_pb2.Struct.FromString(UNKNOWN)
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user")], tools=[tool]))
    with pytest.raises(InvalidRequestError, match="got a field that this server does not know"):
        check_fields(request)


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (
            pb.ChatPrompt(
                messages=[pb.ChatMessage(role="assistant", tool_calls=[struct_pb2.Struct()] * 100)]
                * (MAX_TOOL_CALLS // 100 + 1)
            ),
            "chat.messages",
        ),
        (
            pb.ChatPrompt(
                messages=[pb.ChatMessage(role="user", content="x")],
                template_arguments={"x": "y" * MAX_FREE_FORM_BYTES},
            ),
            "chat",
        ),
    ],
    ids=["tool_calls", "bytes"],
)
async def test_free_form_parts_of_a_chat_are_bounded(chat: pb.ChatPrompt, field: str) -> None:
    async with running_server() as server:
        failure = await failure_of(server.stub.Tokenize(pb.TokenizeRequest(chat=chat)))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(text="x", model="🙂" * 100_000),
        pb.GenerateRequest(text="x", speculation=pb.SpeculationParams(method="🙂" * 100_000)),
        pb.GenerateRequest(text="x", request_id="🙂" * 100_000),
    ],
    ids=["model", "method", "request_id"],
)
async def test_a_name_that_is_refused_is_quoted_in_part(request_: pb.GenerateRequest) -> None:
    async with running_server() as server:
        failure = await failure_of(server.stub.Generate(request_))
    assert "🙂" in failure.message
    assert "expected" in failure.message  # behind what was quoted
    assert len(failure.message.encode()) < 1000

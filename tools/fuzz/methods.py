"""The methods of a server's services, and which statuses of theirs are right. Knows descriptors, no connection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as vllm

from server.pb.slipstream.v1 import admin_pb2, generation_pb2
from tools.fuzz.messages import messages, mutations

GENERATION: ServiceDescriptor = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
ADMIN: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
GATEWAY: ServiceDescriptor = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
HEALTH: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION: ServiceDescriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
MAX_TOKENS = 8

# Never UNKNOWN or INTERNAL, which say that the server is at fault, and never UNAVAILABLE, which says that it is gone.
_RIGHT = frozenset({"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"})
_UNREADABLE = frozenset(
    {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
)  # the latter before anybody reads it: too large
_UNSUPPORTED = frozenset(
    {"Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"}
)  # of gateways


@dataclass(frozen=True)
class Method:
    """One RPC."""

    descriptor: MethodDescriptor

    @property
    def name(self) -> str:
        return f"{self.descriptor.containing_service.name}/{self.descriptor.name}"

    @property
    def path(self) -> str:
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"

    @property
    def is_admin(self) -> bool:
        return self.descriptor.containing_service is ADMIN

    @property
    def shape(self) -> str:
        """Of its calls, as a channel names it."""
        requests = "stream" if self.descriptor.client_streaming else "unary"
        responses = "stream" if self.descriptor.server_streaming else "unary"
        return f"{requests}_{responses}"

    def is_right(self, status: str, payload: bytes) -> bool:
        """Whether an answer to these bytes may have the status."""
        if self.descriptor.containing_service is GATEWAY and self.descriptor.name in _UNSUPPORTED:
            return status == "UNIMPLEMENTED"
        return status in (_RIGHT if self.parses(payload) else _UNREADABLE)

    def parses(self, payload: bytes) -> bool:
        try:
            self._class().FromString(payload)
        except DecodeError:
            return False
        return True

    def payloads(self) -> dict[str, st.SearchStrategy[bytes]]:
        """By kind."""
        filled = self._filled_in().map(lambda message: message.SerializeToString())
        kinds = {
            "any fields": messages(self.descriptor.input_type).map(
                lambda message: message.SerializeToString()
            ),
            "some fields wrong": filled,
            "malformed": filled.flatmap(mutations),
        }
        if self.path.endswith("AdminService/Drain"):  # an empty one would be granted
            return {"malformed": kinds["malformed"].filter(self._is_refused)}
        if self.path.endswith("Health/Watch"):  # which does not end
            return {"malformed": kinds["malformed"].filter(lambda payload: not self.parses(payload))}
        return kinds

    def _class(self) -> type[Message]:
        return message_factory.GetMessageClass(self.descriptor.input_type)

    def _filled_in(self) -> st.SearchStrategy[Message]:
        """A usual request into which random fields were merged: most of it passes, so that the rest is looked at."""

        def fill(drawn: Message) -> Message:
            usual = self._class()()
            usual.CopyFrom(_USUAL.get(self.name, usual))
            usual.MergeFrom(drawn)
            return usual

        return messages(self.descriptor.input_type).map(fill)

    def _is_refused(self, payload: bytes) -> bool:
        return not self.parses(payload) or bool(len(UnknownFieldSet(self._class().FromString(payload))))


def methods() -> Iterator[Method]:
    """All of the five services."""
    for service in (GENERATION, ADMIN, GATEWAY, HEALTH, REFLECTION):
        yield from map(Method, service.methods)


def _usual_request() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        text="the dog", stopping=generation_pb2.StoppingParams(max_tokens=MAX_TOKENS)
    )


_USUAL: dict[str, Message] = {
    "GenerationService/Generate": _usual_request(),
    "GenerationService/GenerateOnce": generation_pb2.GenerateOnceRequest(request=_usual_request()),
    "VllmEngine/Generate": vllm.GenerateRequest(
        request_id="r", text="the dog", sampling_params=vllm.SamplingParams(max_tokens=MAX_TOKENS)
    ),
}

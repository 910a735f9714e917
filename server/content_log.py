"""Writes what was asked and answered to the log, for a server that was told to: `--log-content`.

The only place that does; nothing else logs a prompt or an output, at any level.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

import structlog
from google.protobuf.json_format import MessageToJson, SerializeToJsonError

from server.pb.slipstream.v1 import generation_pb2 as pb

_log = structlog.get_logger(__name__)


class _Sink(Protocol):
    def open(self) -> Awaitable[None]: ...

    def write(self, message: pb.GenerateResponse) -> Awaitable[None]: ...


class LoggedSink:
    """A sink that also keeps the text of each choice, to be logged when the call has ended."""

    def __init__(self, request: pb.GenerateRequest, sink: _Sink) -> None:
        self._request = request
        self._sink = sink
        self._texts: dict[int, list[str]] = {}

    async def open(self) -> None:
        await self._sink.open()

    async def write(self, message: pb.GenerateResponse) -> None:
        if message.HasField("delta"):
            self._texts.setdefault(message.index, []).append(message.delta.text)
        await self._sink.write(message)

    def log(self) -> None:
        _log.info(
            "content",
            request=_text_of(self._request),
            answers=["".join(self._texts[index]) for index in sorted(self._texts)],
        )


def _text_of(request: pb.GenerateRequest) -> str:
    try:
        return MessageToJson(request, indent=None, preserving_proto_field_name=True)
    except SerializeToJsonError:  # the template's variables hold a number that JSON has none for, such as NaN
        return str(request)

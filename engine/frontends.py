"""The engine's side of the socket: who is connected, and whose request is whose.

One ROUTER socket serves any number of frontends. Each gets its own requests' outputs and everybody's load
figures, in one message a step. It knows nothing of what the engine does with a request.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import msgspec
import zmq

from engine.errors import RequestIdInUseError
from engine.loop import Command
from engine.messages import (
    AbortRequests,
    AddRequest,
    Control,
    ControlAnswer,
    EngineFailed,
    FromEngine,
    Hello,
    ModelInfo,
    RequestOutput,
    RequestRefused,
    StepMessage,
    ToEngine,
)

log = logging.getLogger(__name__)

FIRST_HELLO_MS = 5_000  # an engine that fails at once waits so long for somebody to tell
LINGER_MS = 2_000  # to hand over the last messages when the process ends


class Frontends:
    """Inbox and publisher of the engine's loop. One thread."""

    def __init__(self, address: str) -> None:
        """Bind `address` (ipc://...)."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # the engine neither waits for a reader nor loses a token;
        self._socket.setsockopt(zmq.RCVHWM, 0)  # what is unread is bounded by max_tokens
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a frontend that is gone raises
        self._socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._connected: set[bytes] = set()
        self._owners: dict[str, bytes] = {}  # of live requests and of controls without an answer
        self._greeting: ModelInfo | None = None
        self._commands: list[Command] = []

    def poll(self, block: bool) -> list[Command]:
        self._receive(None if block else 0)
        commands, self._commands = self._commands, []
        return commands

    def publish(self, message: FromEngine) -> None:
        match message:
            case StepMessage():
                self._publish_step(message)
            case RequestRefused():
                self._send(self._owners.pop(message.request_id), message)
            case ControlAnswer():
                self._send(self._owners.pop(message.control_id), message)
            case _:
                if isinstance(message, ModelInfo):
                    self._greeting = message
                wait = isinstance(message, EngineFailed) and not self._connected
                self._receive(FIRST_HELLO_MS if wait else 0)
                for identity in list(self._connected):
                    self._send(identity, message)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _publish_step(self, message: StepMessage) -> None:
        outputs: defaultdict[bytes, list[RequestOutput]] = defaultdict(list)
        for output in message.outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None:
                outputs[owner].append(output)
                if output.finish is not None:
                    del self._owners[output.request_id]
        for identity in list(self._connected):
            share = StepMessage(outputs=outputs[identity], stats=message.stats, step=message.step)
            self._send(identity, share)

    def _receive(self, timeout_ms: int | None) -> None:
        """Take in all that has come; wait for something first if nothing is there."""
        if self._commands:
            timeout_ms = 0
        self._socket.poll(timeout_ms)
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            self._take(identity, b"".join(frames))

    def _take(self, identity: bytes, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("dropped a message of %d bytes that cannot be read: %s", len(payload), error)
            return
        self._connected.add(identity)
        if isinstance(message, Hello):
            if self._greeting is not None:
                self._send(identity, self._greeting)
            return
        if isinstance(message, AddRequest | Control):
            new_id = message.request_id if isinstance(message, AddRequest) else message.control_id
            if new_id in self._owners:
                self._send(identity, RequestRefused.from_error(new_id, RequestIdInUseError(new_id)))
                return
            self._owners[new_id] = identity
        self._commands.append(message)

    def _send(self, identity: bytes, message: FromEngine) -> None:
        try:
            self._socket.send_multipart([identity, self._encoder.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        """A frontend is gone: nobody wants its requests."""
        self._connected.discard(identity)
        orphans = [request_id for request_id, owner in self._owners.items() if owner == identity]
        if orphans:
            log.warning("a frontend is gone; ending its %d requests", len(orphans))
            self._commands.append(AbortRequests(orphans))

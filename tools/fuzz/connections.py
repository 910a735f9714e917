"""What is sent to the port of a gRPC server by those who speak something else, or HTTP/2 wrongly."""

from __future__ import annotations

import contextlib
import socket
import struct

from hypothesis import strategies as st

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes(9)[:3] + b"\x04" + bytes(5)
_OTHERS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /slipstream.v1.GenerationService/Generate HTTP/1.1\r\nContent-Length: 999999\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),  # TLS
    PREFACE[:10],
    b"",
)
_GET_LOADS = b"/slipstream.v1.GenerationService/GetLoads"
_TEXTLESS = b"\xff\xfe"
_READ_SECONDS = 0.01
_CLOSE_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: a reset instead of an orderly end


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _header(name: bytes, value: bytes) -> bytes:
    """HPACK: a literal, not indexed, not compressed; both shorter than 127 bytes."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call(path: bytes, *headers: tuple[bytes, bytes]) -> bytes:
    """A whole unary call with an empty message, on a connection of its own."""
    usual = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
    block = b"".join(_header(*header) for header in (*usual, *headers))
    return PREFACE + _SETTINGS + _frame(1, 4, 1, block) + _frame(0, 1, 1, bytes(5))


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    """An HTTP/2 frame of any type; its length may lie."""
    payload = draw(st.binary(max_size=60))
    length = len(payload) if draw(st.booleans()) else draw(st.integers(0, 2**24 - 1))
    kind, flags = draw(st.integers(0, 10)), draw(st.integers(0, 255))
    stream = draw(st.sampled_from((0, 1, 2, 3, 2**31 - 1)))
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


# None has such a path: grpcio prints a traceback where its caller has left. tests/service/test_textless.py has one.
_TEXTLESS_CALLS = (
    call(_GET_LOADS, (b"authorization", b"Bearer " + _TEXTLESS)),
    call(_GET_LOADS, (b"traceparent", _TEXTLESS)),
    call(_GET_LOADS, (_TEXTLESS, b"x")),
)


def conversations() -> st.SearchStrategy[bytes]:
    """All that a client of that kind says."""
    frames = st.lists(_frames(), min_size=1, max_size=6).map(b"".join)
    return st.one_of(
        st.binary(max_size=200),
        st.sampled_from(_OTHERS),
        st.sampled_from(_TEXTLESS_CALLS),
        frames.map(lambda data: PREFACE + data),
        frames.map(lambda data: PREFACE + _SETTINGS + data),
    )


def say(host: str, port: int, data: bytes, *, resets: bool) -> None:
    """Connect, send, look briefly for an answer, and leave."""
    with socket.create_connection((host, port), timeout=5.0) as connection:
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_AT_ONCE)
        with contextlib.suppress(OSError):  # the server may have closed it by now, or have nothing to say
            connection.sendall(data)
            connection.settimeout(_READ_SECONDS)
            connection.recv(65536)

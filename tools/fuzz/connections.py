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
_READ_SECONDS = 0.01
_CLOSE_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: a reset instead of an orderly end


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    """An HTTP/2 frame of any type; its length may lie."""
    payload = draw(st.binary(max_size=60))
    length = len(payload) if draw(st.booleans()) else draw(st.integers(0, 2**24 - 1))
    kind, flags = draw(st.integers(0, 10)), draw(st.integers(0, 255))
    stream = draw(st.sampled_from((0, 1, 2, 3, 2**31 - 1)))
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def conversations() -> st.SearchStrategy[bytes]:
    """All that a client of that kind says."""
    frames = st.lists(_frames(), min_size=1, max_size=6).map(b"".join)
    return st.one_of(
        st.binary(max_size=200),
        st.sampled_from(_OTHERS),
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

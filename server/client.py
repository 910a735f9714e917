"""How our own commands and benchmarks reach a server: address, TLS, bearer token. Knows no RPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from engine.errors import ConfigError

_OPTIONS = (("grpc.max_receive_message_length", -1),)
Option = tuple[str, Any]


@dataclass(frozen=True)
class Connection:
    """Where a server is and what it is shown. Plain HTTP/2 unless `tls_ca` is given."""

    address: str
    token: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None  # PEM: authorities that may have signed the server's certificate
    client_cert: Path | None = None  # PEM, for a server that wants one
    client_key: Path | None = None

    def channel(self) -> grpc.Channel:
        """Raises ConfigError when a file cannot be read, or the address or token is none."""
        self._check()
        credentials = self._credentials()
        if credentials is None:
            channel = grpc.insecure_channel(self.address, options=_OPTIONS)
        else:
            channel = grpc.secure_channel(self.address, credentials, options=_OPTIONS)
        return channel if self.token is None else grpc.intercept_channel(channel, _Bearer(self.token))

    def aio_channel(self, options: Sequence[Option] = ()) -> grpc.aio.Channel:
        """Raises ConfigError when a file cannot be read, or the address or token is none."""
        self._check()
        interceptors = [] if self.token is None else [_AioUnary(self.token), _AioStream(self.token)]
        arguments: dict[str, Any] = {"options": [*_OPTIONS, *options], "interceptors": interceptors}
        credentials = self._credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, **arguments)
        return grpc.aio.secure_channel(self.address, credentials, **arguments)

    def _check(self) -> None:
        if not self.address.strip():
            raise ConfigError(f"address: got {self.address!r}, expected host:port")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError(
                "token: got one that no header can hold, expected printable ASCII (is there a newline at its end?)"
            )

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if self.tls_ca is None:
            if self.client_cert is not None or self.client_key is not None:
                raise ConfigError(
                    "client_cert: got one without tls_ca, expected both: only TLS shows certificates"
                )
            return None
        if (self.client_cert is None) != (self.client_key is None):
            raise ConfigError("client_cert: got one of certificate and key, expected both or none")
        try:
            key, certificate = (
                None if path is None else path.read_bytes() for path in (self.client_key, self.client_cert)
            )
            return grpc.ssl_channel_credentials(self.tls_ca.read_bytes(), key, certificate)
        except OSError as error:
            raise ConfigError(f"tls_ca: cannot read {error.filename}: {error.strerror}") from None


class _Details(grpc.ClientCallDetails):
    """The details of a call with more metadata."""

    def __init__(self, details: Any, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Adds the token to every call of a blocking channel."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, details: Any) -> _Details:
        return _Details(details, (*(details.metadata or ()), self._header))


class _AioBearer:
    """The same for grpc.aio, which wants a class for each kind of call."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    async def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._header)
        return await continuation(details._replace(metadata=metadata), request)


class _AioUnary(_AioBearer, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._call(continuation, client_call_details, request)


class _AioStream(_AioBearer, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._call(continuation, client_call_details, request)

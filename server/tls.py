"""TLS of the listeners: the certificate of the server and, for mutual TLS, the authorities of clients.

Certificates are taken up anew by the next handshake after their files were replaced; connections that are open go on.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from engine.errors import ConfigError
from server.reload import Reloaded


@dataclass(frozen=True)
class TlsFiles:
    """PEM files."""

    certificate: Path  # the server's chain, its own certificate first
    key: Path
    client_authorities: Path | None = None  # given: a client has to show a certificate of one of them

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.client_authorities) if path is not None]


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files. Raises ConfigError when they are wrong at the start."""
    source = Reloaded(files.paths, lambda: _read(files))
    last_given = first = source.current()

    def fetch() -> Any:
        """Called by gRPC before each handshake, in a thread of its own; None: as before."""
        nonlocal last_given
        current = source.current()
        if current is last_given:
            return None
        last_given = current
        return current

    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=files.client_authorities is not None
    )


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Raises ConfigError when a file cannot be read, is not PEM, or key and certificate do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        pair = (files.key.read_bytes(), files.certificate.read_bytes())  # first: these errors name the file
        context.load_cert_chain(files.certificate, files.key, password=_refuse_password)
        if files.client_authorities is not None:
            context.load_verify_locations(files.client_authorities)
        authorities = None if files.client_authorities is None else files.client_authorities.read_bytes()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        names = ", ".join(map(str, files.paths))
        raise ConfigError(f"tls: cannot use {names}: {error}") from None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)


def _refuse_password() -> str:
    raise ValueError("the key is encrypted, expected one without a password")

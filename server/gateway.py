"""Protocols of gateways that are offered beside our own, on the same port: which there are, and how one is made.

Their stubs come in packages of their own, imported only when a protocol is asked for.
"""

from __future__ import annotations

from typing import Protocol

import grpc

from engine.client.base import EngineClient
from engine.config import ModelConfig
from engine.errors import ConfigError
from server.config import GatewayProtocolName
from server.serving import Serving


class GatewayProtocol(Protocol):
    """A service that a gateway speaks."""

    service_name: str  # for health and reflection

    async def load(self) -> None:
        """Read what it tells of the model. Raises CheckpointError."""

    def engine_started(self, client: EngineClient) -> None:
        """Another one each time."""

    def add_to(self, server: grpc.aio.Server) -> None: ...


def make_gateway_protocol(
    name: GatewayProtocolName, serving: Serving, model: ModelConfig
) -> GatewayProtocol | None:
    """None for `none`. Raises ConfigError when its package is not there."""
    if name == "none":
        return None
    try:
        from server.gateway_vllm import VllmEngineService
    except ModuleNotFoundError as error:
        if error.name != "smg_grpc_proto":
            raise
        raise ConfigError(
            "gateway_protocol: got 'vllm' without the package smg-grpc-proto; "
            "expected it to be installed: pip install -e '.[gateway]' in the repository"
        ) from None
    return VllmEngineService(serving, model)

"""Asks a server for its gRPC health, for container engines, which have no probe of their own.

`python -m tools.health_probe ADDRESS [SERVICE]` exits with 0 if it is SERVING, else with 1.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def status(address: str, service: str, timeout: float) -> str:
    """Name of the health status, or of the gRPC status where the server does not answer."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a server for its gRPC health.")
    parser.add_argument("address", help="HOST:PORT")
    parser.add_argument("service", nargs="?", default="readiness", help="readiness (default) or liveness")
    arguments = parser.parse_args()
    answer = status(arguments.address, arguments.service, timeout=3.0)
    print(answer)
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())

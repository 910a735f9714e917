"""Streams one generation over TLS, with a token or both: what `helm test` runs where the server asks for them.

Unlike the `slipstream` command it takes the token from a file, and a certificate with another name than the address.
Arguments: address, name in the certificate, prompt, tokens, seconds. Files in /etc/secrets, each where there is one:
ca.crt or else server.crt (whom to trust), client.crt and client.key (what to show), token.
"""

import sys
from pathlib import Path

import grpc

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc

SECRETS = Path("/etc/secrets")


def secret(*names: str) -> bytes | None:
    """Content of the first of these files that is there."""
    return next((path.read_bytes() for name in names if (path := SECRETS / name).exists()), None)


address, server_name, prompt, max_tokens, timeout = sys.argv[1:]
token = secret("token")
metadata = [("authorization", f"Bearer {token.decode().strip()}")] if token else []
request = pb.GenerateRequest(
    chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=prompt)]),
    stopping=pb.StoppingParams(max_tokens=int(max_tokens)),
)
authority = secret("ca.crt", "server.crt")
if authority is None:
    channel = grpc.insecure_channel(address)
else:
    credentials = grpc.ssl_channel_credentials(authority, secret("client.key"), secret("client.crt"))
    channel = grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", server_name)])
with channel:
    stub = pb_grpc.GenerationServiceStub(channel)
    for response in stub.Generate(request, timeout=float(timeout), metadata=metadata):
        print(response.delta.text, end="", flush=True)

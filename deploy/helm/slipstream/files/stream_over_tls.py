"""Streams one generation over TLS: what `helm test` runs, because the `slipstream` command speaks plain HTTP/2.

Arguments: address, name in the certificate, prompt, tokens, seconds.
"""

import sys
from pathlib import Path

import grpc

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc

address, server_name, prompt, max_tokens, timeout = sys.argv[1:]
authority = next(path for name in ("ca.crt", "tls.crt") if (path := Path("/etc/tls", name)).exists())
credentials = grpc.ssl_channel_credentials(root_certificates=authority.read_bytes())
options = [("grpc.ssl_target_name_override", server_name)]
request = pb.GenerateRequest(
    chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=prompt)]),
    stopping=pb.StoppingParams(max_tokens=int(max_tokens)),
)
with grpc.secure_channel(address, credentials, options) as channel:
    stub = pb_grpc.GenerationServiceStub(channel)
    for response in stub.Generate(request, timeout=float(timeout)):
        print(response.delta.text, end="", flush=True)

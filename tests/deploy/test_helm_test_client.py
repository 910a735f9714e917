"""What `helm test` runs where the server asks for TLS, client certificates and tokens, against such a server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import trustme

from tests.support.certificates import SERVER_NAME, issue, write_server_files
from tests.support.helm_chart import CHART
from tests.support.server_fixture import running_server

ROOT = CHART.parent.parent.parent
TOKEN = "a-token-of-a-test-pod"


async def run_client(secrets: Path, port: int) -> tuple[int, str]:
    """Exit status and output of the script as the pod runs it, with its secrets elsewhere."""
    script = (CHART / "files" / "stream_securely.py").read_text(encoding="utf-8")
    assert "/etc/secrets" in script
    command = [sys.executable, "-c", script.replace("/etc/secrets", str(secrets))]
    process = await asyncio.create_subprocess_exec(
        *[*command, f"127.0.0.1:{port}", SERVER_NAME, "the dog", "4", "30"],
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_it_streams_with_a_certificate_and_a_token_and_fails_without(tmp_path: Path) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    secrets, served = tmp_path / "secrets", tmp_path / "server"
    secrets.mkdir()
    served.mkdir()
    own = issue(clients, "helm-test")
    authority.cert_pem.write_to_path(secrets / "ca.crt")
    own.private_key_pem.write_to_path(secrets / "client.key")
    (secrets / "client.crt").write_bytes(b"".join(blob.bytes() for blob in own.cert_chain_pems))
    (secrets / "token").write_text(f"{TOKEN}\n")
    (served / "tokens.toml").write_text(f'[[token]]\ntenant = "test"\nvalue = "{TOKEN}"\n')
    options = write_server_files(served, authority, clients=clients)
    options["auth_tokens"] = served / "tokens.toml"
    async with running_server(wait_until_ready=False, **options) as server:
        status, output = await run_client(secrets, server.app.port)
        assert (status, bool(output)) == (0, True), output

        (secrets / "token").unlink()
        status, output = await run_client(secrets, server.app.port)
        assert (status, "UNAUTHENTICATED" in output) == (1, True), output

        (secrets / "client.crt").unlink()
        (secrets / "client.key").unlink()
        status, output = await run_client(secrets, server.app.port)
        assert (status, "UNAVAILABLE" in output) == (1, True), output


async def test_it_streams_with_a_token_alone(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "tokens.toml").write_text(f'[[token]]\ntenant = "test"\nvalue = "{TOKEN}"\n')
    async with running_server(auth_tokens=tmp_path / "tokens.toml") as server:
        status, output = await run_client(tmp_path, server.app.port)
    assert (status, bool(output)) == (0, True), output

"""Our own commands against a server that wants mutual TLS and a token."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
import trustme

from tests.support.certificates import (
    SERVER_NAME,
    client_credentials,
    issue,
    wait_until_serving,
    write_server_files,
)
from tests.support.server_fixture import running_server

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-0123456789abcdef"


async def slipstream(*arguments: str, environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit status, output and errors of a command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "server",
        *arguments,
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


async def test_commands_connect_with_tls_and_a_token(tmp_path: Path, authority: trustme.CA) -> None:
    own = issue(authority, "client")
    files = {"ca": tmp_path / "ca.pem", "cert": tmp_path / "own.pem", "key": tmp_path / "own.key"}
    authority.cert_pem.write_to_path(files["ca"])
    own.cert_chain_pems[0].write_to_path(files["cert"])
    own.private_key_pem.write_to_path(files["key"])
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[[token]]\ntenant = "a"\nvalue = "{TOKEN}"\n')
    options = {**write_server_files(tmp_path, authority, clients=authority), "auth_tokens": str(tokens)}
    async with running_server(wait_until_ready=False, **options) as server:
        await wait_until_serving(server, client_credentials(authority, own))
        environment = {
            "SLIPSTREAM_ADDRESS": f"{SERVER_NAME}:{server.app.port}",
            "SLIPSTREAM_TLS_CA": str(files["ca"]),
            "SLIPSTREAM_CLIENT_CERT": str(files["cert"]),
            "SLIPSTREAM_CLIENT_KEY": str(files["key"]),
            "SLIPSTREAM_TOKEN": TOKEN,
            "COLUMNS": "500",  # no path is broken into lines
        }

        assert await slipstream("generate", "the dog", "--raw", environment=environment) == (0, "the dog", "")
        status, output, _ = await slipstream("info", environment=environment)
        assert (status, "KV cache" in output) == (0, True)
        load = ("bench", "--num-requests", "2", "--input-len", "4", "--output-len", "2")
        status, _, errors = await slipstream(*load, environment=environment)
        assert status == 0, errors
        wrong = environment | {"SLIPSTREAM_TOKEN": "wrong-0123456789abcdef"}
        status, _, errors = await slipstream("generate", "the dog", environment=wrong)
        assert (status, "UNAUTHENTICATED" in errors, "wrong-" in errors) == (1, True, False)
        unreadable = environment | {"SLIPSTREAM_TLS_CA": str(tmp_path / "none.pem")}
        status, _, errors = await slipstream("info", environment=unreadable)
        assert (status, "none.pem" in errors) == (2, True)

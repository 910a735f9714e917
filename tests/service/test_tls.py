"""The TLS matrix: who gets through with which certificate, and that files may be replaced while the server runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.errors import ConfigError
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from server.tls import TlsFiles, server_credentials
from tests.support.certificates import (
    OWN_CONNECTION,
    SERVER_NAME,
    channel_to,
    client_credentials,
    issue,
    wait_until_serving,
    write_server_files,
)
from tests.support.server_fixture import RunningServer, collect, running_server, text_request
from tools.server_process import free_port


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def other_authority() -> trustme.CA:
    return trustme.CA()


async def status_with(server: RunningServer, credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
    """Of a call on a new connection."""
    async with channel_to(server, credentials) as channel:
        try:
            await pb_grpc.GenerationServiceStub(channel).GetLoads(pb.GetLoadsRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def serving_tls(options: dict[str, Any]) -> Any:
    """The server's own channel is plain, so it cannot wait for readiness; the engine is ready at once."""
    return running_server(wait_until_ready=False, **options)


async def test_the_right_authority_gets_through_and_a_wrong_one_does_not(
    tmp_path: Path, authority: trustme.CA, other_authority: trustme.CA
) -> None:
    async with serving_tls(write_server_files(tmp_path, authority)) as server:
        await wait_until_serving(server, client_credentials(authority))
        assert await status_with(server, client_credentials(authority)) is grpc.StatusCode.OK
        assert await status_with(server, client_credentials(other_authority)) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError):  # no TLS at all
            await server.stub.GetLoads(pb.GetLoadsRequest(), timeout=10)


async def test_an_expired_certificate_of_the_server_is_refused(tmp_path: Path, authority: trustme.CA) -> None:
    async with serving_tls(write_server_files(tmp_path, authority, expired=True)) as server:
        assert await status_with(server, client_credentials(authority)) is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_takes_only_clients_of_its_authority(
    tmp_path: Path, authority: trustme.CA, other_authority: trustme.CA
) -> None:
    async with serving_tls(write_server_files(tmp_path, authority, clients=authority)) as server:
        good = client_credentials(authority, issue(authority, "client"))
        await wait_until_serving(server, good)
        assert await status_with(server, good) is grpc.StatusCode.OK
        for refused in (None, issue(other_authority, "client"), issue(authority, "client", expired=True)):
            credentials = client_credentials(authority, refused)
            assert await status_with(server, credentials) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_is_rotated_while_a_stream_runs(
    tmp_path: Path, authority: trustme.CA, other_authority: trustme.CA
) -> None:
    files = write_server_files(tmp_path, authority)
    async with serving_tls(files) as server:
        before, after = client_credentials(authority), client_credentials(other_authority)
        await wait_until_serving(server, before)
        async with channel_to(server, before) as old:
            stub = pb_grpc.GenerationServiceStub(old)
            await stub.GetLoads(pb.GetLoadsRequest())
            assert await status_with(server, after) is grpc.StatusCode.UNAVAILABLE
            write_server_files(tmp_path, other_authority)
            assert await status_with(server, after) is grpc.StatusCode.OK
            assert await status_with(server, before) is grpc.StatusCode.UNAVAILABLE
            messages = await collect(stub.Generate(text_request()))  # on the connection that was there
            assert messages[-1].HasField("finished")


async def test_a_broken_new_certificate_leaves_the_old_one_in_service(
    tmp_path: Path, authority: trustme.CA
) -> None:
    files = write_server_files(tmp_path, authority)
    async with serving_tls(files) as server:
        trusting = client_credentials(authority)
        await wait_until_serving(server, trusting)
        right_key = files["tls_key"].read_bytes()
        for broken in (
            b"no PEM",
            issue(authority, SERVER_NAME).private_key_pem.bytes(),
        ):  # and one of another
            files["tls_key"].write_bytes(broken)
            assert await status_with(server, trusting) is grpc.StatusCode.OK
        files["tls_key"].unlink()
        assert await status_with(server, trusting) is grpc.StatusCode.OK
        files["tls_key"].write_bytes(right_key)
        assert await status_with(server, trusting) is grpc.StatusCode.OK


async def test_the_health_port_speaks_no_tls_and_knows_nothing_else(
    tmp_path: Path, authority: trustme.CA
) -> None:
    files, port = write_server_files(tmp_path, authority), free_port()
    async with (
        serving_tls({**files, "health_port": port}) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[OWN_CONNECTION]) as channel,
    ):
        server.channel = channel
        await server.wait_for_health(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.GetLoads(pb.GetLoadsRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_files_that_do_not_belong_together_are_told_at_the_start(
    tmp_path: Path, authority: trustme.CA
) -> None:
    files = write_server_files(tmp_path, authority)
    issue(authority, "other").private_key_pem.write_to_path(files["tls_key"])
    with pytest.raises(ConfigError, match=r"server\.pem"):
        server_credentials(TlsFiles(files["tls_cert"], files["tls_key"]))
    with pytest.raises(ConfigError, match=r"cannot use .*No such file or directory: '.*none\.pem'"):
        server_credentials(TlsFiles(tmp_path / "none.pem", files["tls_key"]))


def test_an_encrypted_key_is_refused_instead_of_asking_the_terminal(
    tmp_path: Path, authority: trustme.CA
) -> None:
    from cryptography.hazmat.primitives import serialization

    files = write_server_files(tmp_path, authority)
    key = serialization.load_pem_private_key(files["tls_key"].read_bytes(), password=None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    files["tls_key"].write_bytes(encrypted)
    with pytest.raises(ConfigError, match="encrypted"):
        server_credentials(TlsFiles(files["tls_cert"], files["tls_key"]))


async def test_every_port_with_tls_has_the_certificate_and_follows_its_rotation(
    tmp_path: Path, authority: trustme.CA, other_authority: trustme.CA
) -> None:
    options: dict[str, Any] = {**write_server_files(tmp_path, authority), "admin_port": free_port()}
    async with serving_tls(options) as server:
        before, after = client_credentials(authority), client_credentials(other_authority)
        await wait_until_serving(server, before)
        assert await admin_status(options["admin_port"], before) is grpc.StatusCode.OK
        write_server_files(tmp_path, other_authority)
        assert await status_with(server, after) is grpc.StatusCode.OK
        assert await admin_status(options["admin_port"], after) is grpc.StatusCode.OK
        assert await admin_status(options["admin_port"], before) is grpc.StatusCode.UNAVAILABLE


async def admin_status(port: int, credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
    """Of a health check on the admin port and a new connection."""
    target = f"{SERVER_NAME}:{port}"
    async with grpc.aio.secure_channel(target, credentials, options=[OWN_CONNECTION]) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK

"""A short form of what `python -m tools.fuzz` does for ten thousand cases."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from tools.fuzz.connections import PREFACE
from tools.fuzz.methods import methods
from tools.fuzz.run import SERVER_ARGUMENTS, run
from tools.server_process import ServerProcess, free_port


def test_no_message_and_no_bytes_harm_the_server(tiny_checkpoint: Path, tmp_path: Path) -> None:
    admin_port = free_port()
    arguments = (*SERVER_ARGUMENTS, "--admin-port", str(admin_port))
    with ServerProcess(tiny_checkpoint, tmp_path / "server.log", arguments=arguments) as server:
        report = run(server, admin_port, num_cases=500, seed=1)
    assert report.faults == []
    assert report.num_cases >= 400
    assert {name.partition(":")[0] for name in report.cases} == {method.name for method in methods()} | {
        "connection"
    }
    assert report.statuses["GenerationService/Generate: OK"] > 0


def test_a_peer_cannot_write_lines_of_its_own_into_the_log(server: ServerProcess) -> None:
    payload = struct.pack(">II", 0, 1) + b"\n[info] forged\n"  # last stream, error code, text
    settings = bytes(3) + b"\x04" + bytes(5)
    goaway = len(payload).to_bytes(3, "big") + b"\x07" + bytes(5) + payload
    with socket.create_connection(("127.0.0.1", server.port), timeout=30.0) as connection:
        connection.sendall(PREFACE + settings + goaway)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):  # until the server has closed it
            pass
    assert "forged" not in server.log_path.read_text()

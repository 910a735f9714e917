"""A TCP proxy that can go silent without closing anything, as a network does that loses a route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class TcpProxy:
    """Forwards bytes while `is_open`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._pumps: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.num_connections = 0
        self.is_open = True
        self.port = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers += [writer, inner_writer]
        for source, sink in ((reader, inner_writer), (inner_reader, writer)):
            self._pumps.append(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if self.is_open:
                    sink.write(data)
                    await sink.drain()
            if self.is_open:
                sink.close()

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def tcp_proxy(target_port: int) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(target_port)
    listener = await asyncio.start_server(proxy.connect, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.close()

"""A TCP proxy before a database, whose connections can be delayed, frozen, cut and half-opened."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

_BYTES: Final = 65536


class Proxy:
    """Passes connections on to a server; what is done to them is done to all that are open."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._moving = asyncio.Event()
        self._moving.set()
        self._refusing = False
        self.delay = 0.0
        """Seconds that everything takes longer, each way."""
        self.port = 0

    async def start(self) -> None:
        """Listen on a port of its own."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Listen no more, and end all connections."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for link in list(self._links):
            await link.over.wait()

    def freeze(self) -> None:
        """Let nothing through, and lose nothing, until `thaw`; new connections do not get on."""
        self._moving.clear()

    def thaw(self) -> None:
        """Let everything through again."""
        self._moving.set()

    def refuse(self) -> None:
        """Cut all connections and end new ones at once, as a server that is away does."""
        self._refusing = True
        self.cut()

    def accept(self) -> None:
        """Pass new connections on again."""
        self._refusing = False

    def slow(self, delay: float) -> None:
        """Have everything take so many seconds longer, each way."""
        self.delay = delay

    def cut(self) -> int:
        """Reset all connections, on both sides; returns how many."""
        links = list(self._links)
        for link in links:
            link.abort()
        return len(links)

    def half_open(self) -> list[_Link]:
        """End all connections on the server's side, and tell the clients nothing of it.

        What they send from then on goes nowhere. `abort` on what is returned ends that.
        """
        links = list(self._links)
        for link in links:
            link.lose_server()
        return links

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        link = _Link(self, writer)
        self._links.add(link)
        try:
            await link.run(reader, *self._target)
        finally:
            self._links.discard(link)
            link.abort()
            link.over.set()

    async def pass_on(self) -> None:
        """Wait until something may go through."""
        await self._moving.wait()
        if self.delay:
            await asyncio.sleep(self.delay)


class _Link:
    """One connection of a client, and its other half to the server."""

    def __init__(self, proxy: Proxy, client: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = client
        self._server: asyncio.StreamWriter | None = None
        self._lost = False
        self._task = asyncio.current_task()
        self.over = asyncio.Event()

    async def run(self, from_client: asyncio.StreamReader, host: str, port: int) -> None:
        with suppress(OSError, asyncio.CancelledError):  # cancelled by `abort` alone
            await self._proxy.pass_on()
            from_server, self._server = await asyncio.open_connection(host, port)
            await asyncio.gather(
                self._pump(from_client, self._server), self._pump(from_server, self._client)
            )

    def abort(self) -> None:
        """Reset the connection."""
        for writer in (self._client, self._server):
            if writer is not None:
                writer.transport.abort()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def lose_server(self) -> None:
        """End the connection on the server's side alone."""
        self._lost = True
        if self._server is not None:
            self._server.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await self._read(reader):
            await self._proxy.pass_on()
            if not self._lost:
                writer.write(data)
                await writer.drain()
        if not self._lost and writer.can_write_eof():
            writer.write_eof()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(_BYTES)
        except OSError:
            return b""

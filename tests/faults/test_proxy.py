"""The proxy of the fault suite: it does to connections what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from faults.proxy import Proxy

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """Give a proxy before a server that echoes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    made = Proxy("127.0.0.1", server.sockets[0].getsockname()[1])
    await made.start()
    yield made
    await made.close()
    server.close()
    await server.wait_closed()


async def connect(proxy: Proxy) -> Ends:
    """Open a connection, and see that it passes something on."""
    ends = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await say(ends, b"hello") == b"hello"
    return ends


async def say(ends: Ends, data: bytes) -> bytes:
    """Send, and return what comes back; nothing if the connection has ended."""
    reader, writer = ends
    try:
        writer.write(data)
        return await reader.read(100)
    except ConnectionError:
        return b""


async def test_cut_ends_what_is_open_and_nothing_else(proxy: Proxy) -> None:
    open_before = await connect(proxy)
    assert proxy.cut() == 1
    assert await say(open_before, b"more") == b""
    open_before[1].close()
    after = await connect(proxy)
    after[1].close()


async def test_freeze_keeps_all_for_later(proxy: Proxy) -> None:
    ends = await connect(proxy)
    proxy.freeze()
    answer = asyncio.create_task(say(ends, b"later"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not answer.done()
    proxy.thaw()
    assert await answer == b"later"
    ends[1].close()


async def test_refusing_lasts_until_it_accepts(proxy: Proxy) -> None:
    proxy.refuse()
    refused = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await say(refused, b"hello") == b""
    refused[1].close()
    proxy.accept()
    accepted = await connect(proxy)
    accepted[1].close()


async def test_a_half_open_connection_is_silent_until_it_is_aborted(proxy: Proxy) -> None:
    ends = await connect(proxy)
    (link,) = proxy.half_open()
    answer = asyncio.create_task(say(ends, b"lost"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not answer.done()
    link.abort()
    assert await answer == b""
    ends[1].close()


async def test_slow_is_slower_by_so_much(proxy: Proxy) -> None:
    ends = await connect(proxy)
    proxy.slow(0.05)
    begun = asyncio.get_running_loop().time()
    assert await say(ends, b"slow") == b"slow"
    assert asyncio.get_running_loop().time() - begun >= 0.1
    ends[1].close()

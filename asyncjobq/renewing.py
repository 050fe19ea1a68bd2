"""The thread in which leases are renewed: a handler that blocks its loop costs nobody a lease."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from asyncjobq.backends.base import Database
from asyncjobq.blocking import LoopWatch
from asyncjobq.heartbeat import Heartbeat
from asyncjobq.repeating import forever

logger = logging.getLogger("asyncjobq.worker")

ENDING: Final = 5.0
"""Seconds for the thread to end; one that waits for a dead connection is left behind."""


class RenewalThread:
    """Renews leases, and stops handlers that have lost theirs, while the loop lives.

    It has a loop and a connection of its own. Only what holds Python's lock for as long as a lease
    lasts (an extension that never releases it) can keep it from its work.
    """

    def __init__(self, heartbeat: Heartbeat, database: Database, watch: LoopWatch) -> None:
        self._heartbeat = heartbeat
        self._database = database
        self._watch = watch
        self._longest_pause = 2 * heartbeat.step

    async def run(self) -> None:
        """Work until cancelled; on the loop of the handlers."""
        apart, loop = await self._database.apart(), asyncio.get_running_loop()
        ended = loop.create_future()
        stop, inner = asyncio.Event(), asyncio.new_event_loop()
        work = partial(self._work, inner, apart, loop, stop)
        thread = threading.Thread(
            target=_tell_end, args=(work, loop, ended), name="asyncjobq renewing", daemon=True
        )
        thread.start()
        try:
            await asyncio.shield(ended)
        finally:
            with suppress(RuntimeError):  # it has ended
                inner.call_soon_threadsafe(stop.set)
            await asyncio.wait({ended}, timeout=ENDING)
            if ended.done():
                thread.join()  # it has nothing more to do
                ended.exception()  # seen
            else:
                logger.warning("The thread that renews leases does not end; it is left behind.")

    def _work(
        self,
        inner: asyncio.AbstractEventLoop,
        apart: Database,
        loop: asyncio.AbstractEventLoop,
        stop: asyncio.Event,
    ) -> None:
        with asyncio.Runner(loop_factory=lambda: inner) as runner:
            runner.run(self._until(stop, apart, loop))

    async def _until(
        self, stop: asyncio.Event, apart: Database, loop: asyncio.AbstractEventLoop
    ) -> None:
        cap = self._longest_pause
        tasks = [
            asyncio.create_task(work)
            for work in (
                forever("renewing", partial(self._renew, apart, loop), longest_pause=cap),
                forever("watching leases", partial(self._expire, apart), longest_pause=cap),
                self._watch_loop(stop),
            )
        ]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _renew(self, apart: Database, loop: asyncio.AbstractEventLoop) -> None:
        await asyncio.sleep(self._heartbeat.step)
        try:
            await self._heartbeat.renew_once(apart)
        except Exception:
            if not await self._is_renewed_by(loop):
                raise

    async def _is_renewed_by(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Renew on the other loop's connections, as long as nobody blocks it.

        The server may take no connection more, or the application's engine may work there alone.
        """
        if self._database.queues or loop.is_closed():
            return False
        there = asyncio.run_coroutine_threadsafe(self._heartbeat.renew_once(), loop)
        try:
            async with asyncio.timeout(self._heartbeat.ttl / 3):
                await asyncio.wrap_future(there)
        except Exception:
            return False
        return True

    async def _expire(self, apart: Database) -> None:
        await asyncio.sleep(self._heartbeat.step)
        await self._heartbeat.expire_once(apart)

    async def _watch_loop(self, stop: asyncio.Event) -> None:
        """Watch the loop of the handlers; once it is closed, nobody will stop this thread."""
        try:
            while True:
                await self._watch.watch_once()
                await asyncio.sleep(self._watch.noticed_after / 2)
        except RuntimeError:
            stop.set()


def _tell_end(
    work: Callable[[], None], loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]
) -> None:
    """Do the thread's work, and say on the loop that it has ended, and why."""
    told: Callable[[], None]
    try:
        work()
        told = partial(ended.set_result, None)
    except BaseException as error:
        told = partial(ended.set_exception, error)
    with suppress(RuntimeError):  # the loop is closed; nobody waits
        loop.call_soon_threadsafe(told)

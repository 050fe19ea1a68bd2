"""Makes the faults of a schedule happen, and counts them."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field

from sqlalchemy import URL

from cases.workers import forks
from faults.proxy import Proxy
from faults.schedule import Fault, Kind
from faults.slots import Slots
from throwaway import ServerProcess


@dataclass
class Injector:
    """What faults can be done to."""

    database: URL
    slots: Slots
    proxies: tuple[Proxy | None, Proxy | None]
    """Before the workers, and before the producer; None where the database is a file."""
    server: ServerProcess | None
    """The server, if it may be restarted."""
    done: Counter[str] = field(default_factory=Counter)
    """Faults that happened, by kind."""
    _restarting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, faults: list[Fault], seconds: float) -> None:
        """Let faults happen, each at its time; ends when all are over, at the earliest then."""
        begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(max(0.0, begun + fault.at - time.monotonic()))
                tasks.create_task(self._happen(fault))
            await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))

    async def _happen(self, fault: Fault) -> None:
        work: dict[Kind, Callable[[Fault], Awaitable[bool]]] = {
            Kind.KILL: self._kill,
            Kind.FREEZE: self._freeze,
            Kind.TERMINATE: self._terminate,
            Kind.HOLD_LOCK: self._hold_lock,
            Kind.STOP_SERVER: self._restart,
            Kind.KILL_SERVER: self._restart,
        }
        if await work.get(fault.kind, self._break_connections)(fault):
            self.done[fault.kind] += 1

    async def _kill(self, fault: Fault) -> bool:
        slot = self.slots.places[fault.slot]
        if slot.worker is None or slot.worker.exit_code is not None:
            return False
        slot.killed.add(slot.worker.pid)
        slot.worker.kill()
        return True

    async def _terminate(self, fault: Fault) -> bool:
        slot = self.slots.places[fault.slot]
        if slot.worker is None:
            return False
        slot.terminated.add(slot.worker.pid)
        with suppress(ProcessLookupError):
            slot.worker.send(signal.SIGTERM)
        return True

    async def _freeze(self, fault: Fault) -> bool:
        worker = self.slots.places[fault.slot].worker
        if worker is None:
            return False
        try:
            worker.freeze()
        except (ProcessLookupError, FileNotFoundError):
            return False
        await asyncio.sleep(fault.lasts)
        with suppress(ProcessLookupError):  # killed meanwhile
            worker.thaw()
        return True

    async def _hold_lock(self, fault: Fault) -> bool:
        path = self.database.database
        process = forks.Process(target=_hold, args=(path, fault.lasts))
        process.start()
        while process.exitcode is None:
            await asyncio.sleep(0.05)
        return bool(process.exitcode == 0)

    async def _restart(self, fault: Fault) -> bool:
        assert self.server is not None
        is_postgresql = self.database.get_backend_name() == "postgresql"
        if fault.kind is Kind.KILL_SERVER:  # whose children outlive a postmaster that is killed
            number = signal.SIGQUIT if is_postgresql else signal.SIGKILL
        else:
            number = signal.SIGINT if is_postgresql else signal.SIGTERM
        async with self._restarting:
            await asyncio.to_thread(self.server.restart, number, fault.lasts)
        return True

    async def _break_connections(self, fault: Fault) -> bool:
        proxy, producers = self.proxies
        assert proxy is not None
        if fault.kind is Kind.CUT:
            assert producers is not None
            return proxy.cut() + producers.cut() > 0
        if fault.kind is Kind.HALF_OPEN:
            links = proxy.half_open()
            await asyncio.sleep(fault.lasts)
            for link in links:
                link.abort()
            return bool(links)
        begin, end = {
            Kind.STALL: (proxy.freeze, proxy.thaw),
            Kind.REFUSE: (proxy.refuse, proxy.accept),
            Kind.DELAY: (lambda: proxy.slow(0.05), lambda: proxy.slow(0.0)),
        }[fault.kind]
        begin()
        await asyncio.sleep(fault.lasts)
        end()
        return True


def _hold(path: str, seconds: float) -> None:
    """Hold the write lock of SQLite's file."""
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)
        connection.rollback()

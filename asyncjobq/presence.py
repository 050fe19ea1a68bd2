"""Which workers there are: each says so in a row of its own, so that others can tell.

Nothing on the path of a job depends on these rows. They are read where people ask why nothing runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, delete, func, select, update

from asyncjobq import codec
from asyncjobq.backends.base import Backend, Database
from asyncjobq.clock import wait_for_event
from asyncjobq.settings import Settings

logger = logging.getLogger("asyncjobq.worker")

SHORTEST_PAUSE: Final = 5.0
"""Seconds between two times that a worker writes its row, at least; else a third of its lease."""
FORGOTTEN: Final = 10
"""Of the time after which a worker counts as gone, so many until its row is deleted."""
MOST_TYPES: Final = 1000
"""A worker with more handlers is taken to have any."""
MOST: Final = 1000
"""Workers that are read, and rows of gone ones that are deleted at once."""
MOST_JOBS: Final = 10_000
"""Leased jobs that are counted, over all workers."""


AT_ONCE: Final = 0.5
"""Seconds within which a worker that stops may have ended; only later does it say that it stops."""
LAST_TRY: Final = 2.0
"""Seconds for a worker that has stopped to delete its row."""


@dataclass(frozen=True)
class WorkerState:
    """A worker as it was when it last said so, and how that looks by the database's clock now."""

    worker_id: str
    host: str
    pid: int
    queues: Mapping[str, int]
    """Slots by queue."""
    types: tuple[str, ...] | None
    """What it has handlers for; None: more than are listed."""
    concurrency: int
    stopping: bool
    """Whether it takes no more jobs and lets those end that it has."""
    started_at: datetime
    seen_at: datetime
    silent_for: float
    """Seconds since then, by the database's clock."""
    live: bool
    """Whether it has said so lately; one that has not was killed, hangs, or lost the database."""
    jobs: Mapping[str, int]
    """Jobs that it has leased, by queue."""

    @property
    def takes_jobs(self) -> bool:
        """Whether it may start jobs now."""
        return self.live and not self.stopping

    def serves(self, queue: str, type_name: str) -> bool:
        """Tell whether it may start jobs of this type in this queue."""
        return self.takes_jobs and queue in self.queues and self.runs(type_name)

    def free(self, queue: str) -> int:
        """Return how many more jobs of a queue it has slots for."""
        slots = min(self.concurrency - sum(self.jobs.values()), self._slots(queue))
        return max(0, slots) if self.takes_jobs else 0

    def _slots(self, queue: str) -> int:
        return self.queues.get(queue, 0) - self.jobs.get(queue, 0)

    def runs(self, type_name: str) -> bool:
        """Tell whether it has a handler for a type."""
        return self.types is None or type_name in self.types


def pause_of(lease_ttl: float) -> float:
    """Return the seconds between two times that a worker with such leases writes its row."""
    return max(SHORTEST_PAUSE, lease_ttl / 3)


def appear(
    connection: Connection,
    backend: Backend,
    settings: Settings,
    types: Iterable[str],
    *,
    stopping: bool = False,
) -> None:
    """Write down that this worker is there, anew or for the first time."""
    workers = backend.tables.workers
    here = workers.c.worker_id == settings.worker_id
    seen = {"seen_at": backend.now(), "stopping": stopping}
    if connection.execute(update(workers).where(here).values(seen)).rowcount:
        return
    row = _row(settings, tuple(types), backend.read_clock(connection), stopping=stopping)
    backend.insert_if_absent(connection, workers, [row])


def _row(
    settings: Settings, types: tuple[str, ...], now: datetime, *, stopping: bool
) -> dict[str, Any]:
    return {
        "worker_id": settings.worker_id,
        "host": codec.printable(socket.gethostname())[:255],
        "pid": os.getpid(),
        "queues": dict(settings.queues),
        "types": list(types) if len(types) <= MOST_TYPES else None,
        "concurrency": settings.concurrency,
        "stopping": stopping,
        "started_at": now,
        "seen_at": now,
        "lost_after": 3 * pause_of(settings.lease_ttl),
    }


def vanish(connection: Connection, backend: Backend, worker_id: str) -> None:
    """Delete the row of a worker that ends."""
    workers = backend.tables.workers
    connection.execute(delete(workers).where(workers.c.worker_id == worker_id))


def gone_for_long(connection: Connection, backend: Backend) -> list[str]:
    """Return the workers whose rows may be deleted."""
    workers = backend.tables.workers
    query = select(workers.c.worker_id).where(_gone(backend)).order_by(workers.c.worker_id)
    return list(connection.scalars(query.limit(MOST)))


def forget_once(connection: Connection, backend: Backend, worker_ids: Iterable[str]) -> None:
    """Delete the rows of workers that are gone for long, by key; who came back meanwhile, stays."""
    workers = backend.tables.workers
    for worker_id in worker_ids:
        here = workers.c.worker_id == worker_id
        connection.execute(delete(workers).where(here, _gone(backend)))


def _gone(backend: Backend) -> ColumnElement[bool]:
    workers = backend.tables.workers
    return workers.c.seen_at < backend.now(-float(FORGOTTEN) * workers.c.lost_after)


def list_workers(connection: Connection, backend: Backend) -> list[WorkerState]:
    """Return the workers that there are or were a moment ago, oldest first."""
    workers = backend.tables.workers
    query = select(*workers.c).order_by(workers.c.seen_at.desc(), workers.c.worker_id)
    rows = connection.execute(query.limit(MOST)).all()
    now = backend.read_clock(connection)
    leased = _leased(connection, backend) if rows else {}
    found = (_state(row, now, leased.get(row.worker_id, {})) for row in rows)
    return sorted(found, key=lambda worker: (worker.started_at, worker.worker_id))


def _state(row: Any, now: datetime, jobs: Mapping[str, int]) -> WorkerState:
    silent_for = max(0.0, (now - row.seen_at).total_seconds())
    return WorkerState(
        worker_id=row.worker_id,
        host=row.host,
        pid=row.pid,
        queues=row.queues,
        types=None if row.types is None else tuple(row.types),
        concurrency=row.concurrency,
        stopping=bool(row.stopping),
        started_at=row.started_at,
        seen_at=row.seen_at,
        silent_for=silent_for,
        live=silent_for <= row.lost_after,
        jobs=jobs,
    )


def _leased(connection: Connection, backend: Backend) -> dict[str, dict[str, int]]:
    """Count the leased jobs by their owner and queue, as far as they are counted."""
    jobs = backend.tables.jobs
    first = select(jobs.c.lease_owner, jobs.c.queue).where(jobs.c.in_flight).limit(MOST_JOBS)
    some = first.subquery("some")
    query: Select[Any] = select(*some.c).group_by(*some.c)
    found: dict[str, dict[str, int]] = {}
    for row in connection.execute(query.add_columns(func.count().label("jobs"))):
        found.setdefault(row.lease_owner, {})[row.queue] = row.jobs
    return found


def unserved(
    workers: Iterable[WorkerState], kinds: Iterable[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return of these queues and types those that no worker serves; none if there is no worker."""
    there = [worker for worker in workers if worker.takes_jobs]
    return [kind for kind in kinds if there and not any(worker.serves(*kind) for worker in there)]


class Presence:
    """Keeps the row of one worker."""

    def __init__(self, database: Database, settings: Settings, types: Iterable[str]) -> None:
        self.pause = 0.0
        """Seconds until its row is written for the first time, or the next."""
        self._database = database
        self._settings = settings
        self._types = tuple(types)
        self._appeared = self._stops = False
        self._looks = 0

    async def appear_once(self, stopping: asyncio.Event) -> None:
        """Write the row, when its time has come or the worker has begun to stop."""
        if self._stops:
            await asyncio.sleep(self.pause)
        elif await wait_for_event(stopping, self.pause):
            await asyncio.sleep(AT_ONCE)
        self._stops = stopping.is_set()
        self.pause = pause_of(self._settings.lease_ttl)
        self._appeared = True
        await self._database.run(self._appear)
        await self._forget()

    def _appear(self, connection: Connection) -> None:
        backend, settings = self._database.backend, self._settings
        appear(connection, backend, settings, self._types, stopping=self._stops)

    async def _forget(self) -> None:
        """Delete the rows of others that are gone for long; now and then."""
        self._looks += 1
        if self._looks % FORGOTTEN != 1:
            return
        backend = self._database.backend
        gone = await self._database.read(lambda c: gone_for_long(c, backend))
        if gone:
            await self._database.run(lambda c: forget_once(c, backend, gone))

    async def vanish_once(self) -> None:
        """Delete the row; if that cannot be done now, the other workers will."""
        if not self._appeared:
            return
        backend, worker_id = self._database.backend, self._settings.worker_id
        try:
            async with asyncio.timeout(LAST_TRY):
                await self._database.run(lambda c: vanish(c, backend, worker_id))
        except Exception as error:
            logger.debug("The row of worker %s was left: %r", worker_id, error)

"""Ready jobs that nobody here will start, told of once: their type or queue may be misspelt."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from sqlalchemy import Connection

from asyncjobq.backends.base import Backend, Database

logger = logging.getLogger("asyncjobq.worker")

BOUND: Final = 100
"""Kinds of ready jobs, each a queue and a type, that one look finds at the most."""
FIRST_PAUSE: Final = 3.0
LONGEST_PAUSE: Final = 60.0

Kind = tuple[str, str]


class Unserved:
    """What a worker has found in the tables that it has no handler for, or not this queue.

    It is told when a second look finds it too, so that workers that do run it have some time.
    """

    def __init__(self, database: Database, queues: Collection[str], types: Collection[str]) -> None:
        self.pause = FIRST_PAUSE
        """Seconds until the next look."""
        self._database = database
        self._queues = queues
        self._types = types
        self._seen: set[Kind] = set()
        self._told: set[Kind] = set()

    async def look_once(self) -> None:
        """Warn, once of each queue and type, of ready jobs that were there at the last look too."""
        self.pause = min(LONGEST_PAUSE, self.pause * 2)
        backend = self._database.backend
        found = await self._database.read(lambda c: ready_kinds(c, backend))
        others = {kind for kind in found if not self._serves(*kind)}
        for queue, type_ in sorted((others & self._seen) - self._told):
            logger.warning(self._text(queue, type_))
        self._told |= others & self._seen
        self._seen = others

    def _serves(self, queue: str, type_: str) -> bool:
        return queue in self._queues and type_ in self._types

    def _text(self, queue: str, type_: str) -> str:
        begin = f"Jobs of the type {type_!r} are ready in the queue {queue!r}, "
        if queue not in self._queues:
            served = ", ".join(map(repr, self._queues))
            return f"{begin}which this worker does not serve; it serves {served}."
        known = ", ".join(map(repr, self._types)) or "none"
        return f"{begin}and this worker has no handler for it; it has those of {known}."


def ready_kinds(connection: Connection, backend: Backend) -> list[Kind]:
    """Return the queues and types that have ready jobs, a bounded number.

    From one to the next is a seek or three in the index, however many jobs are between them.
    """
    found: list[Kind] = []
    kind: Kind | None = _following(connection, backend, "", "")
    while kind is not None and len(found) < BOUND:
        found.append(kind)
        kind = _following(connection, backend, *kind)
    return found


def _following(connection: Connection, backend: Backend, queue: str, type_: str) -> Kind | None:
    """Return the next queue and type that have ready jobs, in the order of the index."""
    jobs = backend.tables.jobs
    in_queue = jobs.c.queue == queue
    found = backend.first_ready(connection, jobs.c.type, in_queue, jobs.c.type > type_)
    if found is not None:
        return (queue, found)
    further = backend.first_ready(connection, jobs.c.queue, jobs.c.queue > queue)
    if further is None:
        return None
    found = backend.first_ready(connection, jobs.c.type, jobs.c.queue == further)
    return None if found is None else (further, found)

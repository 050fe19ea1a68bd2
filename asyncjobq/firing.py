"""One worker's view of schedules: it stores those of its code, and fires what is due."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any, Final

from asyncjobq.backends.base import Database
from asyncjobq.clock import monotonic
from asyncjobq.errors import DatabaseUnavailableError
from asyncjobq.job import Job
from asyncjobq.ready import FiredHere
from asyncjobq.recurrence import Definition
from asyncjobq.schedules import due_schedules, fire_once, save_schedules, unsaved

FIRE_PAUSE: Final = 0.1
"""Seconds until it is seen whether another worker has fired what is due."""
UNFIT_PAUSE: Final = 60.0
"""Seconds until a schedule that could not be fired here is tried again."""

logger = logging.getLogger("asyncjobq.schedules")


class Firing:
    """Fires schedules in the name of one worker."""

    def __init__(self, database: Database, definitions: Mapping[str, Definition]) -> None:
        self.enabled = True
        self.meta: Callable[[], Mapping[str, Any]] = dict
        """Returns what the jobs carry beside what their schedules say."""
        self.on_enqueue: Callable[[Sequence[Job[Any]]], None] = lambda jobs: None
        self._database = database
        self._definitions = definitions
        self._unfit: dict[str, float] = {}

    @property
    def here(self) -> FiredHere | None:
        """Which schedules are fired here; None if none are."""
        now = monotonic()
        self._unfit = {name: until for name, until in self._unfit.items() if until > now}
        return FiredHere(tuple(self._definitions), tuple(self._unfit)) if self.enabled else None

    async def declare_once(self) -> None:
        """Store the schedules that stand in code, where they are not stored as they stand there."""
        backend, wanted = self._database.backend, self._definitions.values()
        changed = await self._database.read(lambda c: unsaved(c, backend, wanted))
        if changed:
            await self._database.run(lambda c: save_schedules(c, backend, changed))

    async def fire_once(self) -> bool:
        """Fire schedules whose time has come; tell whether there were any that nobody else held.

        If a batch is refused, each is fired by itself, so that one spoils no other.
        """
        backend, here = self._database.backend, self.here or FiredHere()
        names = await self._database.read(lambda c: due_schedules(c, backend, here))
        try:
            return bool(names) and await self._fire(names)
        except DatabaseUnavailableError:
            raise
        except Exception:
            return any([await self._fire_alone(name) for name in names])

    async def _fire(self, names: Sequence[str]) -> bool:
        added = Context().run(self.meta)  # nothing of whoever started the worker
        work = partial(fire_once, backend=self._database.backend, names=names, added=added)
        fired = await self._database.run(work)
        self._leave(fired.unfit)
        self.on_enqueue(fired.jobs)
        return fired.moved > 0

    async def _fire_alone(self, name: str) -> bool:
        try:
            return await self._fire([name])
        except DatabaseUnavailableError:
            raise
        except Exception:
            logger.exception("The schedule %r cannot be fired here.", name)
            self._leave([name])
            return False

    def _leave(self, names: Sequence[str]) -> None:
        """Leave schedules to other workers for a while."""
        self._unfit |= dict.fromkeys(names, monotonic() + UNFIT_PAUSE)

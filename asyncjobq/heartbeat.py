"""Keeps the leases of one process alive, and notices when one is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from asyncjobq.backends.base import Database
from asyncjobq.clock import monotonic
from asyncjobq.codec import Encoded
from asyncjobq.lease import (
    Lease,
    Renewal,
    asked_to_end,
    completed_among,
    renew_once,
    still_ours,
)
from asyncjobq.run import JobRun, Stop

logger = logging.getLogger("asyncjobq.heartbeat")

REPORT_INTERVAL: Final = 1.0
"""Seconds between two writes of one job's progress."""


@dataclass(eq=False)
class Beat:
    """What this process knows of one of its leases, by its own monotonic clock."""

    run: JobRun
    ttl: float
    leased_at: float = field(default_factory=monotonic)
    """A moment that is surely not after the one from which the lease counts."""
    renewed: bool = False
    completed: bool = False
    """Whether the handler has ended the job itself: there is no lease any more."""
    reported_at: float = -inf
    held_at: float = -inf
    """When another transaction was last seen to hold the row, which nobody can take then."""
    told: bool = False
    """Whether it was said that the lease has run out here and is kept all the same."""

    @property
    def lease(self) -> Lease:
        return self.run.claimed.lease

    @property
    def due(self) -> float:
        """When to renew: soon after the start, which also shows that it runs, then at ttl/3."""
        return self.leased_at + (self.ttl / 3 if self.renewed else min(1.0, self.ttl / 6))

    @property
    def sure_until(self) -> float:
        """Until when nobody else can have the job, with a margin to stop its handler in."""
        return self.leased_at + self.ttl * 0.9

    @property
    def kept(self) -> bool:
        """Whether the lease is to be renewed: not past the job's deadline."""
        return not (self.completed or self.run.overdue)

    @property
    def is_of_use(self) -> bool:
        """Whether a handler relies on the lease; what becomes of an outcome, its writer says."""
        return self.run.stopped is None and not (self.run.over or self.completed)

    def has_news(self, now: float) -> bool:
        """Whether there is progress to be stored, and the last was stored long enough ago."""
        waited = now - self.reported_at >= REPORT_INTERVAL
        return waited and self.run.context.reported.pending is not None


class Heartbeat:
    """Renews all leases of a worker with one statement at a time.

    Leases are added and removed by the loop of the handlers; they are renewed, and found to be
    lost, from any thread, on the connections that are given, or else on that loop's own.
    """

    def __init__(self, database: Database, ttl: float) -> None:
        self._database = database
        self.ttl = ttl
        self.step = min(1.0, ttl / 12)
        """Seconds between two looks at what is due."""
        self._beats: dict[Lease, Beat] = {}

    @property
    def runs(self) -> Collection[JobRun]:
        """The jobs whose leases are kept."""
        return [beat.run for beat in list(self._beats.values())]

    def add(self, run: JobRun, leased_at: float) -> None:
        """Keep the lease of a job that was claimed not before `leased_at`."""
        beat = self._beats[run.claimed.lease] = Beat(run, self.ttl, leased_at)
        if monotonic() >= beat.sure_until:  # the loop stood still while it was claimed
            _give_up([beat])

    def remove(self, lease: Lease) -> None:
        """Keep this lease no longer."""
        self._beats.pop(lease, None)

    async def renew_once(self, database: Database | None = None) -> None:
        """Renew the leases that are due, and with them those that soon will be."""
        database, now = database or self._database, monotonic()
        kept = [beat for beat in list(self._beats.values()) if beat.kept]
        news = {beat.lease for beat in kept if beat.has_news(now)}
        if not news and all(beat.due > now for beat in kept):
            return
        due = [beat for beat in kept if beat.due <= now + self.step or beat.lease in news]
        leases, backend = [beat.lease for beat in due], database.backend
        reports = {beat.lease: beat.run.context.reported.pending for beat in due}
        progress = {lease: value for lease, value in reports.items() if value is not None}
        renewal = await database.run(lambda c: renew_once(c, backend, leases, self.ttl, progress))
        renewal.lost -= await self._completed_among(database, renewal.lost)
        self._note(renewal, now)
        self._note_stored(progress, renewal, now)

    async def cancel_once(self) -> None:
        """Cancel the handlers of jobs that were asked to end, before their next renewal would."""
        leases, backend = list(self._beats), self._database.backend
        if leases:
            asked = await self._database.read(lambda c: asked_to_end(c, backend, leases))
            self._cancel(asked)

    async def expire_once(self, database: Database | None = None) -> None:
        """Stop the jobs whose lease could not be renewed in time."""
        now = monotonic()
        late = [
            beat
            for beat in list(self._beats.values())
            if now >= beat.sure_until and beat.is_of_use and not self._is_held(beat, now)
        ]
        if late and (database or self._database).queues:
            late = await self._taken_among(late, database or self._database)
        _give_up(late)

    def _is_held(self, beat: Beat, now: float) -> bool:
        """Tell whether the row was held a moment ago; if so, it is renewed a moment after."""
        return beat.held_at + 2 * self.step > now

    async def _taken_among(self, late: list[Beat], database: Database) -> list[Beat]:
        """Return whose lease is another's, or nobody knows; who queues with us can take none."""
        backend, leases = database.backend, [beat.lease for beat in late]
        try:
            ours = await database.read(lambda c: still_ours(c, backend, leases))
        except Exception:
            return late
        for beat in late:
            if beat.lease in ours and not beat.told:
                beat.told = True
                _say(logger.warning, beat, "its handler goes on, for nobody can write meanwhile")
        return [beat for beat in late if beat.lease not in ours]

    def _note(self, renewal: Renewal, asked_at: float) -> None:
        for beat in self._among(renewal.renewed):
            beat.leased_at = asked_at
            beat.renewed = True
            beat.told = False
        for beat in self._among(renewal.held):
            beat.held_at = asked_at
        self._cancel(renewal.cancel_requested)
        for beat in self._among(renewal.lost):
            if beat.is_of_use:
                logger.warning(
                    "The lease of job %s (%s) is lost; its handler is cancelled.",
                    beat.lease.job_id,
                    beat.run.claimed.type,
                )
            beat.run.stop(Stop.LEASE_LOST)

    def _cancel(self, asked: set[Lease]) -> None:
        for beat in self._among(asked):
            beat.run.stop(Stop.CANCELLED)

    def _among(self, leases: Collection[Lease]) -> list[Beat]:
        """Return what is known of leases, as far as they have not been removed meanwhile."""
        found = [self._beats.get(lease) for lease in leases]
        return [beat for beat in found if beat is not None]

    async def _completed_among(self, database: Database, lost: set[Lease]) -> set[Lease]:
        """Return which leases are gone because their handlers have ended their jobs themselves."""
        beats = self._among(lost)
        doubtful = [beat.lease for beat in beats if beat.run.context.completing]
        if not doubtful:
            return set()
        backend = database.backend
        found = await database.read(lambda c: completed_among(c, backend, doubtful))
        for beat in beats:
            beat.completed |= beat.lease in found
        return set(found)

    def _note_stored(self, progress: Mapping[Lease, Encoded], renewal: Renewal, now: float) -> None:
        for beat in self._among(progress.keys() & renewal.renewed):
            beat.run.context.reported.note_stored(progress[beat.lease])
            beat.reported_at = now


def _give_up(late: Iterable[Beat]) -> None:
    for beat in late:
        _say(logger.error, beat, "its handler is cancelled, for another worker may start the job")
        beat.run.stop(Stop.LEASE_LOST)


def _say(log: Callable[..., None], beat: Beat, so: str) -> None:
    log(
        "The lease of job %s (%s) could not be renewed for %.1f s; %s.",
        beat.lease.job_id,
        beat.run.claimed.type,
        monotonic() - beat.leased_at,
        so,
    )

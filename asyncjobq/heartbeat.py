"""Keeps the leases of one process alive, and notices when one is lost."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from asyncjobq.backends.base import Database
from asyncjobq.clock import monotonic
from asyncjobq.lease import Lease, Renewal, asked_to_end, renew_once
from asyncjobq.run import JobRun, Stop

logger = logging.getLogger("asyncjobq.heartbeat")


@dataclass(eq=False)
class Beat:
    """What this process knows of one of its leases, by its own monotonic clock."""

    run: JobRun
    ttl: float
    leased_at: float = field(default_factory=monotonic)
    """A moment that is surely not after the one from which the lease counts."""
    renewed: bool = False

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


class Heartbeat:
    """Renews all leases of a worker with one statement at a time."""

    def __init__(self, database: Database, ttl: float) -> None:
        self._database = database
        self._ttl = ttl
        self.step = min(1.0, ttl / 12)
        """Seconds between two looks at what is due."""
        self._beats: dict[Lease, Beat] = {}

    @property
    def runs(self) -> Collection[JobRun]:
        """The jobs whose leases are kept."""
        return [beat.run for beat in self._beats.values()]

    def add(self, run: JobRun, leased_at: float) -> None:
        """Keep the lease of a job that was claimed not before `leased_at`."""
        self._beats[run.claimed.lease] = Beat(run, self._ttl, leased_at)

    def remove(self, lease: Lease) -> None:
        """Keep this lease no longer."""
        self._beats.pop(lease, None)

    async def renew_once(self) -> None:
        """Renew the leases that are due, and with them those that soon will be."""
        now = monotonic()
        due = [beat for beat in self._beats.values() if beat.due <= now + self.step]
        due = [beat for beat in due if not beat.run.overdue]
        if not due or min(beat.due for beat in due) > now:
            return
        leases = [beat.lease for beat in due]
        backend = self._database.backend
        renewal = await self._database.run(lambda c: renew_once(c, backend, leases, self._ttl))
        self._note(renewal, now)

    async def cancel_once(self) -> None:
        """Cancel the handlers of jobs that were asked to end, before their next renewal would."""
        leases, backend = list(self._beats), self._database.backend
        if leases:
            asked = await self._database.read(lambda c: asked_to_end(c, backend, leases))
            self._cancel(asked)

    def expire_once(self) -> None:
        """Stop the jobs whose lease could not be renewed in time."""
        now = monotonic()
        for beat in self._beats.values():
            if now >= beat.sure_until and beat.run.stopped is None:
                logger.error(
                    "The lease of job %s (%s) could not be renewed for %.1f s; its handler is "
                    "cancelled, for another worker may start the job.",
                    beat.lease.job_id,
                    beat.run.claimed.type,
                    now - beat.leased_at,
                )
                beat.run.stop(Stop.LEASE_LOST)

    def _note(self, renewal: Renewal, asked_at: float) -> None:
        for lease in renewal.renewed & self._beats.keys():
            self._beats[lease].leased_at = asked_at
            self._beats[lease].renewed = True
        self._cancel(renewal.cancel_requested)
        for lease in renewal.lost & self._beats.keys():
            beat = self._beats[lease]
            if beat.run.stopped is None:
                logger.warning(
                    "The lease of job %s (%s) is lost; its handler is cancelled.",
                    lease.job_id,
                    beat.run.claimed.type,
                )
            beat.run.stop(Stop.LEASE_LOST)

    def _cancel(self, asked: set[Lease]) -> None:
        for lease in asked & self._beats.keys():
            self._beats[lease].run.stop(Stop.CANCELLED)

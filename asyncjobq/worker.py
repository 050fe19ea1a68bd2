"""The loops of one worker: claim and start jobs, do the chores, and stop in good order."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Final

from anyio import CapacityLimiter

from asyncjobq.backends.base import Database, Lane, Take
from asyncjobq.backoff import outage_delays
from asyncjobq.clock import monotonic, wait_for_event
from asyncjobq.context import JobContext, Services
from asyncjobq.errors import DatabaseUnavailableError
from asyncjobq.fairshare import Charge, FairShare
from asyncjobq.finalize import Finished
from asyncjobq.handlers import AnyHandler, Handlers
from asyncjobq.heartbeat import Heartbeat
from asyncjobq.job import NO_TIMEOUT, UNSET
from asyncjobq.lease import Claimed, Defaults, claim_once, reclaim_once
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.ready import LaneCursor, count_open, look_once, promote_once
from asyncjobq.run import JobRun, Stop
from asyncjobq.settle import settle_once
from asyncjobq.settings import Settings
from asyncjobq.states import TERMINAL, State
from asyncjobq.transition import End
from asyncjobq.wake import Wake
from asyncjobq.writer import OutcomeWriter

logger = logging.getLogger("asyncjobq.worker")

FLUSH_TIMEOUT: Final = 5.0
"""Seconds at the end of a stop in which outcomes may wait for a database that is away."""


class Worker:
    """One worker: lives as long as one call of `serve`."""

    def __init__(
        self, database: Database, handlers: Handlers, settings: Settings, services: Services
    ) -> None:
        self.settings = settings
        self.ended: Counter[State] = Counter()
        """Jobs that this worker saw end, by their final state."""
        self.on_end: Callable[[int], None] = lambda job_id: None
        self._database = database
        self._handlers = handlers
        self._services = services
        self._wake = Wake()
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._share = FairShare()
        self._lanes = LaneCursor(tuple(settings.queues), handlers.types)
        self._heartbeat = Heartbeat(database, settings.lease_ttl)
        self._writer = OutcomeWriter(database)
        self._threads = CapacityLimiter(settings.concurrency + 32)
        self._held: Counter[str] = Counter()
        self._jobs: set[asyncio.Task[None]] = set()
        self._defaults = self._handler_defaults()
        self._chores_at = 0.0
        self._only_until_idle: bool | None = None

    # -- life -----------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Work until stopped; database outages and bad jobs never end it."""
        logger.info(
            "Worker %s serves %s for %s.",
            self.settings.worker_id,
            ", ".join(self.settings.queues),
            ", ".join(self._handlers.types) or "no type",
        )
        watch = self._database.watch(self._wake.ring, self.settings.poll_interval)
        try:
            async with asyncio.TaskGroup() as background:
                loops = [
                    background.create_task(watch),
                    background.create_task(self._forever("renewing", self._renew)),
                    background.create_task(self._forever("lease watch", self._expire)),
                    background.create_task(self._forever("finalizing", self._write)),
                    background.create_task(self._forever("settling", self._settle_after_ends)),
                ]
                await self._forever("tick", self._tick, until=self._stopping)
                await self._finish_jobs()
                for loop in loops:
                    loop.cancel()
        finally:
            self._wake.close()
            logger.info("Worker %s has stopped.", self.settings.worker_id)

    async def serve_until_idle(self, *, scheduled: bool) -> None:
        """Work until nothing of this worker's queues and types is runnable or running."""
        self._only_until_idle = scheduled
        await self.serve()

    def stop(self) -> None:
        """Claim nothing more; running jobs have `stop_timeout` to end. Again: end at once."""
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()
        self._wake.ring_here()

    async def _finish_jobs(self) -> None:
        await self._wait_for_jobs(self.settings.stop_timeout, unless=self._hurrying)
        for run in self._heartbeat.runs:
            run.stop(Stop.INTERRUPTED)
        await self._wait_for_jobs(FLUSH_TIMEOUT)
        for task in self._jobs:
            task.cancel()

    async def _wait_for_jobs(self, timeout: float, unless: asyncio.Event | None = None) -> None:
        ended = asyncio.ensure_future(asyncio.wait(self._jobs)) if self._jobs else None
        if ended is None:
            return
        sooner = asyncio.ensure_future((unless or asyncio.Event()).wait())
        try:
            await asyncio.wait(
                {ended, sooner}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ended.cancel()
            sooner.cancel()

    async def _forever(
        self,
        name: str,
        step: Callable[[], Awaitable[None]],
        until: asyncio.Event | None = None,
    ) -> None:
        """Repeat a step; after an error wait, longer each time, and go on."""
        delays = outage_delays()
        while until is None or not until.is_set():
            try:
                await step()
                delays = outage_delays()
            except Exception as error:
                delay = next(delays)
                _report(name, error, delay)
                await wait_for_event(until or asyncio.Event(), delay)

    # -- the tick -------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Claim, do the chores if they are due, claim what they made ready; then sleep."""
        await self.claim_once()
        if monotonic() >= self._chores_at and await self.chores_once():
            await self.claim_once()
        if self._only_until_idle is not None and await self._idle():
            self.stop()
            return
        pause = min(self.settings.poll_interval, max(0.0, self._chores_at - monotonic()))
        await self._wake.sleep(pause)
        if self._wake.take_news():
            self._chores_at = 0.0

    async def claim_once(self) -> int:
        """Fill the free slots, as far as there are jobs; returns how many were started."""
        started = 0
        while not self._stopping.is_set() and self._free_slots() > 0:
            lanes = await self._database.read(
                lambda c: self._lanes.scan_once(c, self._database.backend)
            )
            claimed = await self._claim_from(lanes)
            started += claimed
            if not claimed and not self._lanes.cut:
                break
        return started

    async def _claim_from(self, lanes: list[Lane]) -> int:
        """Claim from these lanes until they are empty or the slots are full."""
        total = 0
        while lanes and self._free_slots() > 0:
            takes = self._share.allocate(lanes, self._free_by_queue(), self._free_slots())
            if not takes:
                break
            claimed = await self._claim(takes)
            total += len(claimed)
            got = Counter((job.queue, job.group_key) for job in claimed)
            lanes = _not_exhausted(lanes, takes, got)
        return total

    async def _claim(self, takes: list[Take]) -> list[Claimed]:
        backend, settings = self._database.backend, self.settings
        leased_at = monotonic()
        claimed = await self._database.run(
            lambda c: claim_once(
                c, backend, settings.worker_id, takes, settings.lease_ttl, self._defaults
            )
        )
        for job in claimed:
            self._start(job, leased_at)
        return claimed

    def _free_slots(self) -> int:
        return self.settings.concurrency - self._held.total()

    def _free_by_queue(self) -> dict[str, int]:
        return {queue: most - self._held[queue] for queue, most in self.settings.queues.items()}

    async def chores_once(self) -> bool:
        """Reclaim, settle and promote where there is need; tell whether jobs may be ready now."""
        backend = self._database.backend
        chores = await self._database.read(lambda c: look_once(c, backend))
        moved = False
        if chores.expired:
            moved |= await self._reclaim()
        if chores.unsettled:
            moved |= await self._settle()
        due = chores.next_due
        if due is not None and due <= 0:
            moved |= await self._database.run(lambda c: promote_once(c, backend)) > 0
            due = 0.0 if moved else self.settings.poll_interval
        pause = self.settings.poll_interval
        self._chores_at = monotonic() + (pause if due is None else min(pause, due))
        return moved

    async def _reclaim(self) -> bool:
        backend = self._database.backend
        taken = await self._database.run(lambda c: reclaim_once(c, backend))
        for item in taken:
            logger.warning("Job %s was reclaimed: its lease had run out.", item.row.id)
        self._note_ends([item for item in taken if isinstance(item, End)])
        return bool(taken)

    async def _settle(self) -> bool:
        backend, moved = self._database.backend, False
        while True:
            settled = await self._database.run(lambda c: settle_once(c, backend))
            self._note_ends(settled.ended)
            moved |= settled.promoted > 0
            if not settled.moved:
                return moved

    def _note_ends(self, ends: list[End]) -> None:
        for end in ends:
            self.ended[end.state] += 1
            self.on_end(end.row.id)

    async def _idle(self) -> bool:
        """Tell whether nothing is left to wait for."""
        if self._jobs:
            return False
        backend, settings = self._database.backend, self.settings
        queues, types = tuple(settings.queues), self._handlers.types
        # In this order: what was settled before the first look is seen by the second.
        chores = await self._database.read(lambda c: look_once(c, backend))
        left = await self._database.read(lambda c: count_open(c, backend, queues, types))
        if not self._only_until_idle:
            left.pop(State.SCHEDULED, None)
        overdue = chores.next_due is not None and chores.next_due <= 0
        return not left and not chores.unsettled and not (overdue and self._only_until_idle)

    # -- jobs -----------------------------------------------------------------------------------

    def _start(self, job: Claimed, leased_at: float) -> None:
        handler = self._handlers.find(job.type)
        assert handler is not None, "claimed a type that no handler here runs"
        run = JobRun(job, handler, self._context(job), self._threads, self._grace())
        self._held[job.queue] += 1
        self._heartbeat.add(run, leased_at)
        charge = self._share.start(job.group_key, job.weight)
        task = asyncio.create_task(self._job(run, charge), name=f"asyncjobq {job.lease.job_id}")
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _job(self, run: JobRun, charge: Charge) -> None:
        """Run one job, see its outcome committed, and only then give its slot back."""
        lease, begun = run.claimed.lease, monotonic()
        try:
            outcome = await run.outcome()
            if outcome.ending is not Ending.LEASE_LOST:
                self._note(run, outcome, await self._writer.write(Finished(lease, outcome)))
        finally:
            self._heartbeat.remove(lease)
            self._held[run.claimed.queue] -= 1
            self._share.finish(charge, monotonic() - begun)
            self._wake.ring_here()

    def _note(self, run: JobRun, outcome: Outcome, written: bool) -> None:
        job = run.claimed
        if not written:
            logger.warning(
                "The outcome of job %s (%s, attempt %s) is refused: its lease was lost, and the "
                "job is another worker's.",
                job.lease.job_id,
                job.type,
                job.attempt,
            )
        elif outcome.state in TERMINAL:
            self.ended[outcome.state] += 1
            self.on_end(job.lease.job_id)
        if outcome.error and written:
            logger.warning(
                "Job %s (%s, attempt %s of %s) %s: %s",
                job.lease.job_id,
                job.type,
                job.attempt,
                job.max_attempts,
                outcome.ending.replace("_", " "),
                outcome.error.splitlines()[-1],
            )

    def _context(self, job: Claimed) -> JobContext:
        return JobContext(
            job_id=job.lease.job_id,
            type=job.type,
            stored_args=job.args,
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            deadline=_deadline(job.started_at, job.timeout),
            services=self._services,
        )

    def _grace(self) -> float:
        return min(5.0, self.settings.lease_ttl / 3)

    def _handler_defaults(self) -> Defaults:
        handlers = {name: self._handlers.find(name) for name in self._handlers.types}
        known = {name: handler for name, handler in handlers.items() if handler is not None}
        return Defaults(
            max_attempts={name: found.options.max_attempts for name, found in known.items()},
            timeout={name: self._timeout_of(found) for name, found in known.items()},
        )

    def _timeout_of(self, handler: AnyHandler) -> float:
        timeout = handler.options.timeout
        return self.settings.default_timeout if timeout is UNSET else float(timeout)

    # -- the other loops ------------------------------------------------------------------------

    async def _renew(self) -> None:
        await asyncio.sleep(self._heartbeat.step)
        await self._heartbeat.renew_once()

    async def _expire(self) -> None:
        await asyncio.sleep(self._heartbeat.step)
        self._heartbeat.expire_once()

    async def _write(self) -> None:
        await self._writer.write_once()

    async def _settle_after_ends(self) -> None:
        await self._writer.unsettled.wait()
        self._writer.unsettled.clear()
        if await self._settle():
            self._wake.ring_here()


def _not_exhausted(
    lanes: list[Lane], takes: list[Take], got: Mapping[tuple[str, str], int]
) -> list[Lane]:
    """Return the lanes that gave as much as was asked of them, or were not asked."""
    short = {
        (lane.queue, lane.group_key)
        for take in takes
        for lane in take.lanes
        if got.get((lane.queue, lane.group_key), 0) < take.count
    }
    return [lane for lane in lanes if (lane.queue, lane.group_key) not in short]


def _deadline(started_at: datetime, timeout: float) -> datetime | None:
    return None if timeout == NO_TIMEOUT else started_at + timedelta(seconds=timeout)


def _report(name: str, error: Exception, delay: float) -> None:
    if isinstance(error, DatabaseUnavailableError):
        logger.warning("%s (%s; trying again in %.1f s)", error, name, delay)
    else:
        logger.error("The %s loop met %r; going on in %.1f s.", name, error, delay, exc_info=error)

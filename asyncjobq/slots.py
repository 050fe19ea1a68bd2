"""The jobs that run in this process, each in its slot until its outcome is committed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final

from anyio import CapacityLimiter

from asyncjobq import codec
from asyncjobq.clock import monotonic
from asyncjobq.context import JobContext, LeaseRef, Services
from asyncjobq.emitter import Emitter
from asyncjobq.fairshare import Charge, FairShare
from asyncjobq.finalize import Finished
from asyncjobq.handlers import AnyHandler
from asyncjobq.heartbeat import Heartbeat
from asyncjobq.injection import Resources
from asyncjobq.lease import Claimed
from asyncjobq.middleware import Middleware
from asyncjobq.options import NO_TIMEOUT
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.processes import HandlerProcesses
from asyncjobq.run import JobRun, Stop
from asyncjobq.settings import Settings
from asyncjobq.states import TERMINAL, State
from asyncjobq.subscribers import Subscribers
from asyncjobq.writer import OutcomeWriter

logger = logging.getLogger("asyncjobq.worker")

LEFT_BEHIND: Final = 32
"""Handlers that may outlive their jobs before each takes a slot away."""


@dataclass(frozen=True)
class Surroundings:
    """What a scheduler's users put around the runs of its jobs."""

    subscribers: Subscribers = field(default_factory=Subscribers)
    around: Sequence[Middleware] = ()
    meta: Callable[[], Mapping[str, Any]] = dict
    """What jobs carry that this worker enqueues for schedules."""
    resources: Resources = field(default_factory=Resources)


@dataclass(slots=True, eq=False)
class Begun:
    """A job in its slot, until its outcome is committed."""

    job: Claimed
    run: JobRun | None = None
    """None for a job that could not be started, and takes no slot."""
    charge: Charge | None = None
    at: float = field(default_factory=monotonic)
    duration: float = 0.0


class Slots:
    """Starts leased jobs and sees each to its committed end."""

    def __init__(
        self,
        settings: Settings,
        share: FairShare,
        heartbeat: Heartbeat,
        writer: OutcomeWriter,
        services: Services,
        surroundings: Surroundings,
    ) -> None:
        self.on_end: Callable[[int, State], None] = lambda job_id, state: None
        self.on_return: Callable[[float], None] = lambda delay: None
        self.on_free: Callable[[], None] = lambda: None
        self.on_slot_free: Callable[[Claimed], None] = lambda job: None
        self._settings = settings
        self._share = share
        self._heartbeat = heartbeat
        self._writer = writer
        self._services = services
        self._around = surroundings.around
        self._resources = surroundings.resources
        self._emitter = Emitter(surroundings.subscribers, settings.worker_id)
        self.processes = HandlerProcesses()
        self._threads = CapacityLimiter(settings.concurrency + LEFT_BEHIND)
        self._held: Counter[str] = Counter()
        self._left_behind: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._begun: set[Begun] = set()
        self._emptied = asyncio.Event()

    @property
    def free(self) -> int:
        """How many jobs may be started now."""
        too_many = max(0, len(self._left_behind) - LEFT_BEHIND)
        return 0 if self._closed else self._settings.concurrency - self._held.total() - too_many

    @property
    def free_by_queue(self) -> dict[str, int]:
        """How many jobs of each queue may be started now."""
        return {queue: most - self._held[queue] for queue, most in self._settings.queues.items()}

    @property
    def empty(self) -> bool:
        """Whether no job runs here."""
        return not self._begun

    def close(self) -> None:
        """Start no job from now on."""
        self._closed = True

    def start(
        self, job: Claimed, handler: AnyHandler, leased_at: float, weight: float | None = None
    ) -> None:
        """Run a job that was leased not before `leased_at` by the monotonic clock.

        Its group is charged by `weight`, or else by the job's own.
        """
        grace = min(5.0, self._settings.lease_ttl / 3)
        most = self._settings.max_result_bytes
        run = JobRun(
            job,
            handler,
            context_of(job, self._services),
            self._threads,
            grace,
            most,
            self._around,
            self._resources,
            self.processes,
        )
        run.on_start = partial(self._emitter.started, job)
        charge = self._share.start(job.group_key, job.weight if weight is None else weight)
        self._held[job.queue] += 1
        self._heartbeat.add(run, leased_at)
        self._emitter.leased(job)
        if self._closed:  # claimed by a transaction that was under way
            run.stop(Stop.INTERRUPTED)
        self._begun.add(begun := Begun(job, run, charge))
        run.begin(partial(self._ended, begun))

    def refuse(self, job: Claimed, error: Exception) -> None:
        """End a job that cannot be started, as failed; it takes no slot."""
        logger.error("Job %s (%s) cannot be started: %r", job.lease.job_id, job.type, error)
        reason = codec.printable(f"The job cannot be started: {error!r}")
        self._begun.add(begun := Begun(job))
        self._finish(begun, Outcome(Ending.FAILED, error=reason))

    async def cancel_once(self) -> None:
        """Cancel the handlers of jobs here whose end was asked for."""
        await self._heartbeat.cancel_once()

    def interrupt(self) -> None:
        """Cancel the handlers because of shutdown; their attempts are given back."""
        for run in self._heartbeat.runs:
            run.stop(Stop.INTERRUPTED)

    def abandon(self) -> None:
        """Wait for nothing more: what is still held here runs out with its lease."""
        for begun in list(self._begun):
            self._leave(begun)

    async def wait_until_empty(self, timeout: float, unless: asyncio.Event | None = None) -> None:
        """Wait for the jobs to end, at most so many seconds, or until the event is set."""
        if not self._begun:
            return
        self._emptied.clear()
        ended = asyncio.ensure_future(self._emptied.wait())
        sooner = asyncio.ensure_future((unless or asyncio.Event()).wait())
        try:
            await asyncio.wait(
                {ended, sooner}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ended.cancel()
            sooner.cancel()

    def _ended(self, begun: Begun, outcome: Outcome) -> None:
        """Have the outcome of a handler that has ended, or was given up, committed."""
        run = begun.run
        if run is None or begun not in self._begun:  # nobody waits for it any more
            return
        if (task := run.left_behind) is not None:
            self._leave_behind(run, task)
        self._finish(begun, outcome)

    def _finish(self, begun: Begun, outcome: Outcome) -> None:
        begun.duration = monotonic() - begun.at
        if outcome.ending is Ending.LEASE_LOST:
            return self._over(begun, outcome, None)
        finished = Finished(begun.job.lease, outcome)
        if begun.run is not None:
            context = begun.run.context
            told, completing = context.reported.pending, context.completing
            finished = Finished(begun.job.lease, outcome, told, completing)
        return self._writer.write(finished, partial(self._written, begun, outcome))

    def _written(self, begun: Begun, outcome: Outcome, state: State | None) -> None:
        if begun in self._begun:
            self._note(begun.job, outcome, state)
            self._over(begun, outcome, state)

    def _over(self, begun: Begun, outcome: Outcome, state: State | None) -> None:
        """Tell of an end that is committed, and only then give the slot back."""
        try:
            self._emitter.finished(begun.job, outcome, state, begun.duration)
        finally:
            self._leave(begun)

    def _leave(self, begun: Begun) -> None:
        self._begun.discard(begun)
        if begun.run is not None and begun.charge is not None:
            self._heartbeat.remove(begun.job.lease)
            self._held[begun.job.queue] -= 1
            self._share.finish(begun.charge, monotonic() - begun.at)
        self.on_slot_free(begun.job)
        self.on_free()
        if not self._begun:
            self._emptied.set()

    def _leave_behind(self, run: JobRun, task: asyncio.Task[Any]) -> None:
        """Let a handler go on without its slot; those beyond a number each keep one from use."""
        self._left_behind.add(task)
        self._emitter.left_behind(run.claimed, run.stopped.value if run.stopped else "")
        if len(self._left_behind) > LEFT_BEHIND:
            logger.critical(
                "%s handlers go on although their jobs have ended. Until they return, this worker "
                "has fewer slots; restart it, and mend what hangs or run it in a process.",
                len(self._left_behind),
            )

        def returned(_task: asyncio.Task[Any]) -> None:
            self._left_behind.discard(task)
            job_id, job_type = run.claimed.lease.job_id, run.claimed.type
            logger.warning("The handler of job %s (%s), left behind, has ended.", job_id, job_type)
            self.on_free()

        task.add_done_callback(returned)

    def _note(self, job: Claimed, outcome: Outcome, state: State | None) -> None:
        place = (job.lease.job_id, job.type, job.attempt)
        if state is None:
            logger.warning(
                "The outcome of job %s (%s, attempt %s) is refused: its lease was lost.", *place
            )
            return
        if outcome.error and state is State.DONE:
            reason = codec.one_line(outcome.summary or outcome.error)
            logger.warning("Job %s (%s, attempt %s) was completed already when: %s", *place, reason)
        elif outcome.error:
            ending = outcome.ending.replace("_", " ")
            reason = codec.one_line(outcome.summary or outcome.error)
            logger.warning("Job %s (%s, attempt %s) %s: %s", *place, ending, reason)
        if state in TERMINAL:
            self.on_end(job.lease.job_id, state)
        elif outcome.retry_after is not None:
            self.on_return(outcome.retry_after)


def context_of(job: Claimed, services: Services) -> JobContext:
    """Return what the handler of a leased job is given of it."""
    endless = job.timeout == NO_TIMEOUT
    return JobContext(
        job_id=job.lease.job_id,
        type=job.type,
        stored_args=job.args,
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        deadline=None if endless else job.started_at + timedelta(seconds=job.timeout),
        lease=LeaseRef(job.lease.job_id, job.lease.owner, job.lease.token),
        services=services,
        queue=job.queue,
        group_key=job.group_key,
        stored_meta=job.meta,
        stored_checkpoint=job.checkpoint,
    )

"""The life of one worker: its loops, and its stop in good order."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Final

from asyncjobq.backends.base import Database
from asyncjobq.backends.bounded import bounded
from asyncjobq.backoff import outage_delays
from asyncjobq.blocking import LoopWatch
from asyncjobq.clock import monotonic, wait_for_event
from asyncjobq.context import Services
from asyncjobq.emitter import Emitter
from asyncjobq.errors import ConfigurationError, DatabaseUnavailableError
from asyncjobq.fairshare import FairShare
from asyncjobq.handlers import Handlers
from asyncjobq.heartbeat import Heartbeat
from asyncjobq.limit_rules import LimitRules
from asyncjobq.limiter import Limiter
from asyncjobq.outbox import Outbox
from asyncjobq.presence import Presence
from asyncjobq.renewing import RenewalThread
from asyncjobq.repeating import forever, report
from asyncjobq.retention import Retention
from asyncjobq.settings import Settings
from asyncjobq.settle import Settled, Sweep
from asyncjobq.slots import Slots, Surroundings
from asyncjobq.states import State
from asyncjobq.tick import Tick
from asyncjobq.unserved import Unserved
from asyncjobq.wake import Wake
from asyncjobq.writer import OutcomeWriter

logger = logging.getLogger("asyncjobq.worker")

FLUSH_TIMEOUT: Final = 5.0
"""Seconds for cancelled handlers to end and their outcomes to be written, when stopping."""


class Worker:
    """One worker: made for one call of `serve`, on the running loop."""

    def __init__(
        self,
        database: Database,
        handlers: Handlers,
        settings: Settings,
        services: Services,
        rules: LimitRules,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.settings = settings
        self.ended: Counter[State] = Counter()
        """Jobs that this worker saw end, by their final state."""
        self.on_end: Callable[[int], None] = lambda job_id: None
        self.stopped = asyncio.Event()
        database = bounded(database, settings.lease_ttl)
        self._handlers = handlers
        self._database = database
        self._wake = Wake()
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._heartbeat = Heartbeat(database, settings.lease_ttl)
        around = surroundings or Surroundings()
        emitter = Emitter(around.subscribers, settings.worker_id)
        self._renewal = RenewalThread(
            self._heartbeat, database, LoopWatch(lambda: self._heartbeat.runs, emitter)
        )
        self._outbox = Outbox(database, emitter)
        self._writer = OutcomeWriter(database, self._outbox)
        share = FairShare()
        self._resources = around.resources
        self._slots = Slots(settings, share, self._heartbeat, self._writer, services, around)
        self._slots.on_free = self._wake.ring_here
        self._limiter = Limiter(rules, settings.poll_interval, self._wake.ring_here)
        self._slots.on_slot_free = self._limiter.ended
        self._tick = Tick(
            database,
            handlers,
            settings,
            share,
            self._slots,
            self._outbox,
            self._limiter,
            around.subscribers,
        )
        self._tick.firing.meta = around.meta
        self._slots.on_end = self._tick.on_end = self._note_end
        self._slots.on_return = self._tick.expect_due
        self._outbox.on_settled = self._note_settled
        self._held_pauses = self._new_held_pauses()
        self._retention = Retention(database, settings.retention)
        self._declared = asyncio.Event()
        self._presence = Presence(database, settings, handlers.types)
        self._unserved = Unserved(database, settings.queues, handlers.types)
        self._ends_when_idle = False
        self._waits_for_scheduled = False

    async def serve(
        self, check: Callable[[], Awaitable[None]], *, in_background: bool = False
    ) -> None:
        """Work until stopped; database outages and bad jobs never end it.

        `check` says first what is wrong with the database; one that is away is waited for. What
        else is wrong is raised, but `in_background`, where nobody would see it, is logged until it
        is put right, and raised if it never was.
        """
        try:
            if await self._until_answered(check, in_background):
                async with aclosing(self._resources), aclosing(self._slots.processes):
                    await self._work()
        finally:
            self._limiter.close()
            self._wake.close()
            self.stopped.set()

    async def _work(self) -> None:
        logger.info(
            "Worker %s serves the queues %s and the types %s.",
            self.settings.worker_id,
            ", ".join(self.settings.queues),
            ", ".join(self._handlers.types) or "(none)",
        )
        watch = self._database.watch(self._wake.ring, self.settings.poll_interval)
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(watch),
                group.create_task(forever("renewing", self._renewal.run)),
                group.create_task(forever("finalizing", self._writer.write_once)),
                group.create_task(forever("settling", self._settle)),
                group.create_task(forever("looking for others' jobs", self._look_for_others)),
                group.create_task(forever("saying that it is there", self._appear)),
                group.create_task(forever("declaring", self._declare, until=self._declared)),
            ]
            if self.settings.retention:
                loops.append(group.create_task(forever("pruning", self._prune)))
            ticking = group.create_task(forever("ticking", self._wake_up, until=self._stopping))
            await self._stopping.wait()
            # A claim that is under way has its end awaited, or nobody would run what it takes.
            await asyncio.wait({ticking}, timeout=FLUSH_TIMEOUT)
            ticking.cancel()
            await self._finish_jobs()
            for loop in loops:
                loop.cancel()
        await self._presence.vanish_once()
        logger.info("Worker %s has stopped.", self.settings.worker_id)

    def end_when_idle(self, *, scheduled: bool) -> None:
        """Stop once nothing of this worker's queues and types is runnable or running."""
        self._ends_when_idle, self._waits_for_scheduled = True, scheduled
        self._presence.pause = 1.0
        self._tick.firing.enabled = False
        self._declared.set()

    def stop(self, *, now: bool = False) -> None:
        """Claim nothing more, and let jobs end for `stop_timeout` unless it must be `now`."""
        if now:
            self._hurrying.set()
        if not self._stopping.is_set():
            logger.info("Worker %s stops.", self.settings.worker_id)
        self._stopping.set()
        self._slots.close()
        self._wake.ring_here()

    async def _until_answered(
        self, check: Callable[[], Awaitable[None]], in_background: bool
    ) -> bool:
        """Ask until the database answers; False if the worker was stopped before."""
        delays, wrong = outage_delays(), None
        while not self._stopping.is_set():
            delay = next(delays)
            try:
                await check()
            except DatabaseUnavailableError as error:
                report("starting", error, delay)
            except ConfigurationError as error:
                if not in_background:
                    raise
                wrong = error
                logger.critical("No job runs here: %s (looking again in %.1f s)", error, delay)
            else:
                return True
            await wait_for_event(self._stopping, delay)
        if wrong is not None:
            raise wrong
        return False

    async def _finish_jobs(self) -> None:
        """Let jobs end, cancel those that do not, and release them: renewing goes on meanwhile."""
        await self._slots.wait_until_empty(self.settings.stop_timeout, unless=self._hurrying)
        self._slots.interrupt()
        await self._slots.wait_until_empty(FLUSH_TIMEOUT)
        self._slots.abandon()

    async def _wake_up(self) -> None:
        """Claim; do the chores if they are due, and claim what they made ready; then sleep."""
        await self._tick.claim_once()
        if monotonic() >= self._tick.chores_at and await self._tick.chores_once():
            await self._tick.claim_once()
        if not self._tick.interrupted:
            await self._rest()
        if self._wake.take_news():
            self._tick.chores_at = 0.0
            self._tick.rounds.wake()
            self._limiter.told()

    async def _rest(self) -> None:
        """Sleep until there may be something to do, or stop because there will be nothing."""
        if self._ends_when_idle and await self._is_idle():
            await self._tick.tell_held_once()
            for _ in range(2):
                await self._unserved.look_once()
            self.stop()
            return
        due = max(0.0, self._tick.chores_at - monotonic())
        opens = min(self._limiter.opens_in, self._tick.rounds.next)
        await self._wake.sleep(min(self.settings.poll_interval, due, opens))

    async def _is_idle(self) -> bool:
        return await self._tick.is_idle(scheduled=self._waits_for_scheduled)

    async def _look_for_others(self) -> None:
        await asyncio.sleep(self._unserved.pause)
        if self._slots.empty:
            await self._unserved.look_once()

    async def _appear(self) -> None:
        await self._presence.appear_once(self._stopping)

    async def _declare(self) -> None:
        """Store the schedules that stand in code; beside the other loops, since it may wait."""
        if self._handlers.definitions:
            await self._tick.firing.declare_once()
            self._wake.ring()
        self._declared.set()

    async def _settle(self) -> None:
        """Settle what was left, without waiting for the next chores; what is held, again soon."""
        await self._outbox.left.wait()
        self._outbox.left.clear()
        sweep = Sweep()
        while not sweep.over:
            await self._outbox.sweep(sweep)
        if sweep.held:
            await wait_for_event(self._outbox.left, next(self._held_pauses))
            self._outbox.left.set()
        else:
            self._held_pauses = self._new_held_pauses()

    def _new_held_pauses(self) -> Iterator[float]:
        return outage_delays(base=0.02, cap=self.settings.poll_interval)

    def _note_settled(self, settled: Settled) -> None:
        self._tick.note_settled(settled)
        if settled.promoted or settled.ended or settled.asked:
            self._wake.ring_here()

    async def _prune(self) -> None:
        await asyncio.sleep(self._retention.pause)
        await self._retention.prune_once()

    def _note_end(self, job_id: int, state: State) -> None:
        self.ended[state] += 1
        self.on_end(job_id)

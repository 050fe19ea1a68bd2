"""What a worker does at each wake: scan → rank → lease, and the chores that make jobs ready."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

from sqlalchemy import Connection

from asyncjobq.backends.base import Database, Lane, Take
from asyncjobq.clock import monotonic
from asyncjobq.emitter import Emitter
from asyncjobq.fairshare import FairShare
from asyncjobq.firing import FIRE_PAUSE, Firing
from asyncjobq.handlers import AnyHandler, Handlers
from asyncjobq.lease import Claimed, Defaults, claim_once
from asyncjobq.limited import LimitedClaim, claim_limited_once
from asyncjobq.limiter import Limiter
from asyncjobq.options import UNSET
from asyncjobq.outbox import Outbox
from asyncjobq.pauses import NOTHING, closed_lanes
from asyncjobq.permits import make_rows
from asyncjobq.ready import (
    SKIPPED_NOTHING,
    Chores,
    LaneCursor,
    any_open,
    any_ready,
    look_once,
    promote_once,
)
from asyncjobq.reclaiming import Reclaiming
from asyncjobq.rounds import Rounds
from asyncjobq.settings import Settings
from asyncjobq.settle import Settled, Sweep
from asyncjobq.slots import Slots
from asyncjobq.states import State
from asyncjobq.subscribers import Subscribers
from asyncjobq.transition import End

logger = logging.getLogger("asyncjobq.worker")


class Tick:
    """One worker's view of what is to be done, one `…_once` method a chore."""

    def __init__(
        self,
        database: Database,
        handlers: Handlers,
        settings: Settings,
        share: FairShare,
        slots: Slots,
        outbox: Outbox,
        limiter: Limiter,
        subscribers: Subscribers,
    ) -> None:
        self.on_end: Callable[[int, State], None] = lambda job_id, state: None
        self.chores_at = 0.0
        """When the chores are due next, by the monotonic clock."""
        self.interrupted = False
        """Whether the last claim left off before the slots were full or the jobs at an end."""
        self.firing = Firing(database, handlers.definitions)
        self.reclaiming = Reclaiming(
            database, Emitter(subscribers, settings.worker_id), settings.lease_ttl
        )
        self.reclaiming.on_ends = self._note_ends
        self._expected = inf
        self._sweep = Sweep()
        self._database = database
        self._handlers = handlers
        self._settings = settings
        self._share = share
        self._slots = slots
        self._outbox = outbox
        self._limiter = limiter
        self._again = self._rekeyed = False
        self._emitter = Emitter(subscribers, settings.worker_id)
        self.firing.on_enqueue = self._emitter.enqueued
        self._lanes = LaneCursor(tuple(settings.queues), handlers.types)
        self._skipped = SKIPPED_NOTHING
        self.rounds = Rounds(settings.poll_interval)
        self._defaults = defaults_of(handlers, settings)

    # -- scan, rank, lease ----------------------------------------------------------------------

    async def claim_once(self) -> int:
        """Fill the free slots as far as there are jobs; returns how many were started.

        It leaves off once the chores are due, and says so in `interrupted`: where jobs end as fast
        as they are claimed, slots are free for ever, and a round over many lanes may be long.
        """
        self.interrupted = False
        if self._slots.free > 0:
            await self._limiter.ask()
            reopened = self._limiter.take_reopened()
            skipped = self._limiter.skipped(self._lanes.kinds)
            if self.rounds.rests and self._skipped.closes(skipped):
                started = await self._claim_from(reopened, self._slots.free)
                if self._slots.free == 0:
                    self.rounds.full()
                return started
        started = 0
        while self._slots.free > 0:
            lanes, free = await self._scan(), self._slots.free
            claimed = await self._claim_from(lanes, free)
            started += claimed
            self.rounds.page(claimed, resumed=self._lanes.resumed, rekeyed=self._rekeyed)
            more = self._lanes.cut or self._again or claimed >= free
            if not more and self.rounds.last_page():
                return started
            if self._slots.free > 0 and monotonic() >= self.chores_at:
                self.interrupted = True
                return started
        self.rounds.full()
        return started

    async def _scan(self) -> list[Lane]:
        free, backend = self._slots.free_by_queue, self._database.backend
        queues = {queue for queue, slots in free.items() if slots > 0}
        skipped = self._skipped = self._limiter.skipped(self._lanes.kinds)
        return await self._database.read(
            lambda c: self._lanes.scan_once(c, backend, queues, skipped)
        )

    async def _claim_from(self, lanes: list[Lane], most: int) -> int:
        """Claim at most so many jobs from these lanes.

        Slots that are freed meanwhile wait for the next scan: it may show other groups, which must
        have their turn.
        """
        total, looked = 0, False
        self._again = self._rekeyed = False
        while (lanes := self._limiter.open(lanes)) and total < most:
            takes = self._share.allocate(
                lanes, self._slots.free_by_queue, most - total, self._limiter.is_limited
            )
            if not takes:
                break
            claim = await self._claim(takes)
            total += len(claim.claimed)
            self._rekeyed |= claim.rekeyed
            if not claim.missing:  # or they were not tried
                lanes = _not_exhausted(lanes, takes, claim.claimed)
            if claim.waits and not looked:
                looked = True
                await self._look(lanes)
        return total

    async def _look(self, lanes: list[Lane]) -> None:
        """Learn which limits of many lanes are closed; to try each would be a claim for a few."""
        limited = [lane for lane in self._limiter.open(lanes) if self._limiter.is_limited(lane)]
        if len(limited) > self._slots.free:
            look = partial(self._limiter.look_once, backend=self._database.backend, lanes=limited)
            self._limiter.note(await self._database.read(look))

    async def _claim(self, takes: list[Take]) -> LimitedClaim:
        leased_at = monotonic()
        plain, limited = self._limiter.parted(takes)
        alone = self._database.backend.claims_alone and not limited
        run = self._database.run_alone if alone else self._database.run
        claim = await run(lambda c: self._claim_in(c, plain, limited))
        weights = {lane.group_key: lane.head_weight for take in takes for lane in take.lanes}
        for job in claim.claimed:
            self._start(job, leased_at, weights.get(job.group_key))
        self._limiter.started(claim.claimed)
        self._limiter.note(claim.waits)
        # A limit that cut a group's claim short says nothing of the group's other lanes.
        self._again |= bool(limited and claim.claimed)
        if claim.missing:
            backend, missing = self._database.backend, claim.missing
            await self._database.run(lambda c: make_rows(c, backend, missing))
        return claim

    def _start(self, job: Claimed, leased_at: float, weight: float | None) -> None:
        try:
            self._slots.start(job, self._handlers[job.type], leased_at, weight)
        except Exception as error:  # the others are leased too, and must not be left so
            self._slots.refuse(job, error)

    def _claim_in(
        self, connection: Connection, plain: list[Take], limited: list[Take]
    ) -> LimitedClaim:
        backend, settings = self._database.backend, self._settings
        owner, ttl, defaults = settings.worker_id, settings.lease_ttl, self._defaults
        result = LimitedClaim()
        if limited:
            rules = self._limiter.rules
            result = claim_limited_once(connection, backend, owner, limited, ttl, defaults, rules)
        if plain:
            result.claimed += claim_once(connection, backend, owner, plain, ttl, defaults)
        return result

    # -- chores ---------------------------------------------------------------------------------

    def expect_due(self, delay: float) -> None:
        """Do the chores in so many seconds at the latest: a job will be due then."""
        self._expected = min(self._expected, monotonic() + delay)
        self.chores_at = min(self.chores_at, self._expected)

    async def chores_once(self) -> bool:
        """Reclaim, settle, promote and fire where there is need; tell whether jobs may be ready."""
        backend = self._database.backend
        self._expected = inf
        fired = self.firing.here
        chores, settings = await self._database.read(
            lambda c: (look_once(c, backend, fired), self._limiter.read_settings(c, backend))
        )
        moved = self._limiter.note_settings(settings)
        moved |= await self._close_lanes(chores)
        if chores.cancelling:
            await self._slots.cancel_once()
        if chores.expired:
            moved |= await self.reclaiming.reclaim_once()
            self.expect_due(self.reclaiming.pause)
        if chores.unsettled:
            moved |= await self._outbox.sweep(self._sweep)
            moved |= not self._sweep.over
            self._sweep = Sweep() if self._sweep.over else self._sweep
        pause = self._settings.poll_interval
        if chores.overdue:
            moved |= await self._database.run(lambda c: promote_once(c, backend)) > 0
        elif chores.next_due is not None:
            pause = min(pause, chores.next_due)
        if chores.fires:
            moved |= await self.firing.fire_once()
            pause = min(pause, FIRE_PAUSE)
        elif chores.next_fire is not None:
            pause = min(pause, chores.next_fire)
        if moved:  # there may be more, or the next due time soon
            pause = 0.0
            self.rounds.wake()
        self.chores_at = min(monotonic() + pause, self._expected)
        return moved

    async def _close_lanes(self, chores: Chores) -> bool:
        """Leave paused lanes out of the scan; tell whether it was others before."""
        backend, closed = self._database.backend, NOTHING
        if chores.paused:
            closed = await self._database.read(lambda c: closed_lanes(c, backend))
        return self._lanes.close(closed)

    def note_settled(self, settled: Settled) -> None:
        """Take note of what a settling in this process has ended and let go."""
        self._note_ends(settled.ended)
        if settled.promoted:
            self.rounds.wake()
        if settled.scheduled or settled.asked:  # those that run here are told by the chores
            self.expect_due(0.0)

    def _note_ends(self, ends: Sequence[End]) -> None:
        for end in ends:
            self.on_end(end.row.id, end.state)

    async def is_idle(self, *, scheduled: bool) -> bool:
        """Tell whether nothing of this worker's queues and types is runnable or running.

        With `scheduled`, jobs whose time is still to come count too.
        """
        if not self._slots.empty:
            return False
        backend, queues = self._database.backend, tuple(self._settings.queues)
        types = self._handlers.types
        # In this order: what was settled before the first look is seen by the second.
        chores = await self._database.read(lambda c: look_once(c, backend))
        if chores.unsettled or (chores.overdue and not scheduled):
            return False
        kinds = self._lanes.kinds
        closed = {kind for kind in kinds if self._limiter.allows_nothing(kind) is not None}
        return not await self._database.read(
            lambda c: any_open(c, backend, queues, types, scheduled=scheduled, closed=closed)
        )

    async def tell_held_once(self) -> None:
        """Warn of ready jobs that never start because a limit allows nothing."""
        held = {kind: self._limiter.allows_nothing(kind) for kind in self._lanes.kinds}
        shut = [kind for kind, limit in held.items() if limit is not None]
        if not shut:
            return
        backend = self._database.backend
        for queue, type_ in await self._database.read(lambda c: any_ready(c, backend, shut)):
            logger.warning(
                "Ready jobs of the type %r in the queue %r are left: the limit %r allows nothing.",
                *(type_, queue, held[queue, type_]),
            )


def _not_exhausted(
    lanes: Sequence[Lane], takes: Sequence[Take], claimed: Sequence[Claimed]
) -> list[Lane]:
    """Return the lanes that gave as much as was asked of them, or were not asked."""
    got = Counter((job.queue, job.type, job.limit_key, job.group_key) for job in claimed)
    short: set[Lane] = set()
    for take in takes:
        if sum(got[lane.place] for lane in take.lanes) < take.count:
            short.update(take.lanes)
    return [lane for lane in lanes if lane not in short]


def defaults_of(handlers: Handlers, settings: Settings) -> Defaults:
    """Return what a claim fills in where a job says nothing of its own."""
    known: Mapping[str, AnyHandler] = {name: handlers[name] for name in handlers.types}
    return Defaults(
        max_attempts={name: found.options.max_attempts for name, found in known.items()},
        timeout={name: _timeout(found, settings) for name, found in known.items()},
        cost={name: found.options.cost for name, found in known.items()} or {"": 1.0},
    )


def _timeout(handler: AnyHandler, settings: Settings) -> float:
    timeout = handler.options.timeout
    return settings.default_timeout if timeout is UNSET else float(timeout)

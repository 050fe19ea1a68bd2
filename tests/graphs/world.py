"""The tables beside the model: each step is taken on both, and what the rows say is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, delete, event, select

from asyncjobq import State, settle
from asyncjobq.backends.base import Backend
from asyncjobq.finalize import Finished, finalize_once
from asyncjobq.job import Job
from asyncjobq.lease import Lease, reclaim_once
from asyncjobq.outcomes import Outcome
from asyncjobq.ready import promote_once
from asyncjobq.settle import Settled, Sweep, settle_once
from asyncjobq.states import IN_FLIGHT, TERMINAL
from conformance.steps import Step, claiming, succeeded
from graphs.model import Change, Item, Model

T = TypeVar("T")
FOLLOWERS: Final = settle.FOLLOWERS
TICKS: Final = 400
"""More settlings than any example needs; one that never ends needs more."""


class Crash(Exception):
    """The end of a process between two statements."""


class World:
    """One scheduler's tables on one connection, and the model of what is in them."""

    def __init__(self, engine: Engine, backend: Backend) -> None:
        self.engine = engine
        self.backend = backend
        self.model = Model()
        self.states: dict[int, State] = {}
        self.unsettled: set[int] = set()
        jobs, deps = backend.tables.jobs, backend.tables.deps
        names = ("id", "kind", "state", "cause", "cancel_requested", "settled")
        # In id order: parents come before what is in them, for their ends depend on it.
        self._rows = select(*(jobs.c[name] for name in names)).order_by(jobs.c.id)
        self._edges = select(deps.c.job_id, deps.c.depends_on_id, deps.c.on_failure)
        self._edges = self._edges.where(~deps.c.satisfied)

    def clear(self) -> None:
        """Begin anew."""
        self.backend.clock_offset = 0.0
        self.model, self.states = Model(), {}
        with self.engine.begin() as connection:
            connection.execute(delete(self.backend.tables.deps))
            jobs = self.backend.tables.jobs
            connection.execute(delete(jobs).where(jobs.c.parent_id.is_not(None)))
            connection.execute(delete(jobs))

    def take(self, step: Step[T], crash_after: int | None = None) -> T:
        """Take a step in a transaction; a crash at one of its statements rolls it back."""
        with self.engine.begin() as connection:
            if crash_after is not None:
                _crash_after(connection, crash_after)
            return step(connection, self.backend)

    # -- steps on both --------------------------------------------------------------------------

    def change(self, change: Change) -> None:
        """Change the model, and see that the rows have changed likewise, and no others."""
        self.model.put(change)
        differing = self._differing(self._read())
        assert not differing, f"rows differ from the model: {differing}"

    def claim(self, count: int, ttl: float) -> list[int]:
        """Claim jobs; each must be one that may run."""
        claimed = self.take(claiming(count, ttl=ttl))
        change = {}
        for job in claimed:
            item = self.model.items[job.lease.job_id]
            assert self.may_run(item), f"claimed, but must not run: {item}"
            left = item.attempts_left - 1
            expires = self.model.now + ttl
            held = replace(item, expires=expires, token=job.lease.token, attempts_left=left)
            change[item.id] = held
        self.change(change)
        return sorted(change)

    def may_run(self, item: Item) -> bool:
        """Tell whether an item may be leased, but for what is being cancelled above it."""
        return not (item.started or item.container) and self.model.state(item) is State.READY

    def lease(self, item: Item) -> Lease:
        return Lease(item.id, "worker", item.token)

    def finish(self, item: Item, outcome: Outcome) -> None:
        """Write the end of an attempt."""
        batch = [Finished(self.lease(item), outcome)]
        written = self.take(lambda c, b: finalize_once(c, b, batch))
        assert [one.lease.job_id for one in written.written] == [item.id]
        model = self.model
        if outcome.retry_after is None:
            self.change(model.end(item, outcome.state))
        else:
            delay = outcome.retry_after
            self.change(model.give_back(item, delay, costs=outcome.costs_attempt))

    def reclaim(self) -> None:
        """Take back the leases that ran out."""
        taken = {item.row.id for item in self.take(reclaim_once)}
        model = self.model
        expired = [i for i in model.items.values() if i.expires is not None]
        expired = [item for item in expired if (item.expires or 0) < model.now]
        assert taken == {item.id for item in expired}
        self.change({k: v for item in expired for k, v in model.reclaim(item).items()})

    def written(self, jobs: Sequence[Job[Any]], items: Sequence[Item]) -> None:
        """Take note of new jobs, in the order in which they were asked for."""
        assert [job.id for job in jobs] == [item.id for item in items]
        self.change({item.id: item for item in items})

    def pass_time(self, seconds: float) -> None:
        """Move the clock."""
        self.backend.clock_offset += seconds
        self.model.now += seconds

    # -- settling -------------------------------------------------------------------------------

    def settle_once(
        self,
        limit: int = settle.ROWS,
        followers: int = FOLLOWERS,
        after: int = 0,
        crash_after: int | None = None,
    ) -> Settled:
        """Settle some rows; whatever that changes must be possible."""
        settle.FOLLOWERS = followers  # type: ignore[misc]
        try:
            done = self.take(lambda c, b: settle_once(c, b, after=after, limit=limit), crash_after)
        except Crash:
            self.change({})
            return Settled()
        finally:
            settle.FOLLOWERS = FOLLOWERS  # type: ignore[misc]
        self._follow()
        return done

    def settle(self, limit: int = settle.ROWS, followers: int = FOLLOWERS) -> None:
        """Settle all that can be, and see that it is the end of it: the states are the oracle's."""
        sweep, calls = Sweep(), 0
        while not sweep.over:
            sweep.note(self.settle_once(limit, followers, sweep.after))
            calls += 1
            assert calls < TICKS, f"settling does not come to an end: {self.unsettled}"
        assert not self.unsettled, f"unsettled rows are left: {self.unsettled}"
        change = next(self.model.possible_changes(), None)
        assert change is None, f"settling left undone: {change}"
        self.take(promote_once)
        self._read()
        expected = {item.id: self.model.state(item) for item in self.model.items.values()}
        assert {i: _unstarted(s) for i, s in self.states.items()} == expected

    def _follow(self) -> None:
        """Apply to the model, one by one, the possible changes that the rows show."""
        rows = self._read()
        while change := self._next_change(rows):
            self.model.put(change)
        differing = self._differing(rows)
        assert not differing, f"settling did what is not possible: {differing}"

    def _next_change(self, rows: dict[int, tuple[Any, ...]]) -> Change | None:
        """Return a possible change after which the model is nearer to the rows.

        Changes may prevent others, so those come first that settling makes first.
        """
        found: list[tuple[int, Change]] = []
        for number in self._differing(rows):
            item = self.model.items[number]
            for change in self.model.possible(item):
                now = change[number]
                if now.edges != item.edges:
                    found += [(0, change)] if now.edges >= rows[number][3] else []
                elif all(_leads_to(one, rows[other]) for other, one in change.items()):
                    found.append((_rank(item, now), change))
        return min(found, key=lambda one: one[0])[1] if found else None

    # -- the rows -------------------------------------------------------------------------------

    def _read(self) -> dict[int, tuple[Any, ...]]:
        with self.engine.begin() as connection:
            rows = connection.execute(self._rows).all()
            edges = connection.execute(self._edges).all()
        found: dict[int, set[tuple[int, str]]] = {row.id: set() for row in rows}
        for job_id, upstream, rule in edges:
            found[job_id].add((upstream, rule))
        self.states = {row.id: State(row.state) for row in rows}
        self.unsettled = {row.id for row in rows if not row.settled}
        return {row.id: (*_facts(row), frozenset(found[row.id])) for row in rows}

    def _differing(self, rows: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        items = self.model.items
        assert rows.keys() == items.keys()
        return {
            number: f"row {facts}, model {items[number].facts}"
            for number, facts in rows.items()
            if facts != items[number].facts
        }

    # -- the end --------------------------------------------------------------------------------

    def run_to_the_end(self) -> None:
        """Do what workers do until nothing is left; then everything must have ended."""
        for _ in range(len(self.model.items) * 3 + 5):
            self.settle()
            open_items = [item for item in self.model.items.values() if not item.ended]
            if not open_items:
                return
            self.claim(100, 1000.0)
            for item in open_items:
                held = self.model.items[item.id]
                if held.leased:
                    self.finish(held, succeeded(1))
            self.pass_time(10_000.0)
            self.take(promote_once)
        states = {i: s for i, s in self.states.items() if s not in TERMINAL}
        raise AssertionError(f"these never end: {states}")


def _facts(row: Any) -> tuple[Any, ...]:
    state = State(row.state)
    open_here = "waits" if state is State.WAITING and row.kind == "job" else "in line"
    place = state if state in TERMINAL else "leased" if state in IN_FLIGHT else open_here
    return (place, row.cause, bool(row.cancel_requested) and state not in TERMINAL)


def _rank(item: Item, now: Item) -> int:
    """Tell when settling makes a change: it cancels, revives, asks, and closes at last."""
    if item.ended:
        return 2
    if now.over is not item.over:
        return 1
    return 4 if now.ended else 3


def _leads_to(item: Item, facts: tuple[Any, ...]) -> bool:
    """Tell whether an item is what its row shows, or will be when its children have ended."""
    if item.over is facts[0] is State.CANCELLED and not item.ended:
        return bool(item.cause == facts[1])
    return bool(item.facts[:3] == facts[:3])


def _unstarted(state: State) -> State:
    return State.LEASED if state is State.RUNNING else state


def _crash_after(connection: Connection, statements: int) -> None:
    left = iter(range(statements))

    def crash(*_: object) -> None:
        if next(left, None) is None:
            raise Crash

    event.listen(connection, "before_cursor_execute", crash)


Call = Callable[[World], None]

"""How much of each limit is used, what waits for it, and which limits hold one job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from sqlalchemy import Connection, func, select

from asyncjobq.backends.base import Backend
from asyncjobq.errors import JobNotFoundError
from asyncjobq.limit_rules import LimitRules, Place, Use
from asyncjobq.limits import Budget, Capacity, Concurrency, Limit, RateLimit, amount_of
from asyncjobq.meters import Level, Meter, meter_of
from asyncjobq.models import LANE, in_state
from asyncjobq.permits import as_set, limit_rows, live_permits
from asyncjobq.states import State

MOST: Final = 10_000
"""Jobs that are counted at the most, and limits that are returned, unless more are asked for."""

_KINDS: Final[dict[type[Limit], str]] = {
    Concurrency: "concurrency",
    RateLimit: "rate",
    Budget: "budget",
    Capacity: "capacity",
}


@dataclass(frozen=True)
class LimitState:
    """One limit as it is now, for one value of its key ("" where it has none)."""

    name: str
    value: str
    kind: str
    amount: float
    """What is allowed: jobs at a time, starts per `per`, or cost per `per`."""
    per: float | None
    """Seconds."""
    used: float
    """Jobs that run, starts that the bucket has not regained, or cost spent in this window."""
    waiting: int
    """Ready jobs that have this limit, as far as they were counted."""
    full: bool | None = None
    """Whether it keeps a job from starting now; None for a capacity, which only workers ask."""
    opens_in: float | None = None
    """Seconds until a full one may have room; None: when a job ends, or the limit is changed."""


def limit_states(
    connection: Connection, backend: Backend, rules: LimitRules, most: int = MOST
) -> list[LimitState]:
    """Return the limits that were used or that jobs wait for, by name and value, at most so many.

    Of the ready jobs, so many are counted, in the order of the lanes.
    """
    limits = backend.tables.limits
    first = select(limits).order_by(limits.c.name, limits.c.value).limit(most)
    rows = {(row.name, row.value): row for row in connection.execute(first)}
    waiting = _waiting(connection, backend, rules, most)
    rows |= limit_rows(connection, backend, waiting.keys() - rows.keys())
    found: list[Use] = []
    for name, value in sorted({*rows, *waiting}):
        limit = rules.by_name.get(name)
        if limit is None or (limit.key is not None and not value and not waiting[name, value]):
            continue  # only holds what was set at runtime, or its limit is unknown here
        found.append(Use(limit, value))
    return _states(connection, backend, found[:most], rows, waiting)


def limits_of_job(
    connection: Connection, backend: Backend, job_id: int, rules: LimitRules
) -> list[LimitState]:
    """Return the limits that one job has; those that are `full` have no room for it now.

    How many jobs wait for them is not counted. Raises JobNotFoundError.
    """
    jobs = backend.tables.jobs
    columns = [*(jobs.c[name] for name in (*LANE, "cost")), backend.text_of(jobs.c.args)]
    query = select(*columns[:-1], columns[-1].label("text")).where(jobs.c.id == job_id)
    row: Any = connection.execute(query).one_or_none()
    if row is None:
        raise JobNotFoundError(job_id)
    uses = rules.uses(_with_its_key(row, rules))
    rows = limit_rows(connection, backend, [use.place for use in uses])
    cost = rules.cost_of(row.type) if row.cost is None else row.cost
    return _states(connection, backend, uses, rows, Counter(), cost)


@dataclass(frozen=True)
class _Placed:
    queue: str
    type: str
    limit_key: str
    group_key: str


def _with_its_key(row: Any, rules: LimitRules) -> _Placed:
    """Return where a job belongs, also before a claim has seen that its key is missing."""
    placed = _Placed(row.queue, row.type, row.limit_key, row.group_key)
    if rules.has_keys_of(placed):
        return placed
    key = rules.stored_key_of(row.queue, row.type, row.text)
    return _Placed(row.queue, row.type, key, row.group_key)


def _states(
    connection: Connection,
    backend: Backend,
    uses: Iterable[Use],
    rows: dict[Place, Any],
    waiting: Counter[Place],
    cost: float | None = None,
) -> list[LimitState]:
    uses = list(uses)
    counted = [rows[use.place].id for use in uses if use.place in rows]
    live, now = live_permits(connection, backend, counted), backend.read_clock(connection)
    found: list[LimitState] = []
    for use in uses:
        if isinstance(use.limit, Capacity):
            found.append(LimitState(use.limit.name, "", "capacity", inf, None, 0.0, 0))
            continue
        row = rows.get(use.place)
        chosen = as_set(use.limit, rows.get((use.limit.name, "")))
        level = Level() if row is None else Level(row.level, row.moment)
        meter = meter_of(chosen, level, 0 if row is None else live[row.id], now)
        found.append(_state(use, chosen, meter, waiting[use.place], cost))
    return found


def _state(use: Use, limit: Any, meter: Meter, waiting: int, cost: float | None) -> LimitState:
    full = meter.room() <= 0 or (cost is not None and not meter.fits(cost))
    return LimitState(
        *use.place,
        kind=_KINDS[type(limit)],
        amount=amount_of(limit),
        per=getattr(limit, "per", None),
        used=meter.used,
        waiting=waiting,
        full=full,
        opens_in=meter.wait() if full else None,
    )


def _waiting(
    connection: Connection, backend: Backend, rules: LimitRules, most: int
) -> Counter[Place]:
    """Count the ready jobs that have each limit."""
    jobs = backend.tables.jobs
    ready = select(*(jobs.c[name] for name in LANE)).where(in_state(jobs, State.READY))
    first = ready.limit(most).subquery("first")
    lanes = [first.c[name] for name in LANE]
    query = select(*lanes, func.count().label("jobs")).group_by(*lanes)
    waiting: Counter[Place] = Counter()
    for row in connection.execute(query):
        lane: Any = row
        for use in rules.uses(lane):
            if not isinstance(use.limit, Capacity):
                waiting[use.place] += lane.jobs
    return waiting

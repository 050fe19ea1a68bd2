"""What people change at runtime: limits and the weights of groups, and what they see of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, select, update

from asyncjobq.backends.base import Backend
from asyncjobq.errors import ConfigurationError, LeaseLostError
from asyncjobq.lease import Lease
from asyncjobq.limit_rules import LimitRules, Place
from asyncjobq.limits import Budget, Capacity, Concurrency, Limit, RateLimit
from asyncjobq.meters import BudgetMeter, Level, meter_of
from asyncjobq.models import LANE, in_state
from asyncjobq.permits import as_set, live_permits, open_permits, save_level
from asyncjobq.states import State


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
    """Ready jobs that have this limit."""


def set_limit(
    connection: Connection,
    backend: Backend,
    name: str,
    *,
    amount: float,
    per: float | None,
    burst: int | None,
) -> None:
    """Let a limit have other numbers than the code says, from the next claim of every worker on."""
    limits = backend.tables.limits
    row_id = _row_of(connection, backend, name)
    values = {"amount": amount, "per": per, "burst": burst}
    connection.execute(update(limits).where(limits.c.id == row_id).values(values))


def clear_limit(connection: Connection, backend: Backend, name: str) -> None:
    """Let a limit have the numbers that the code says."""
    limits = backend.tables.limits
    row_id = _row_of(connection, backend, name)
    nothing = {"amount": None, "per": None, "burst": None}
    connection.execute(update(limits).where(limits.c.id == row_id).values(nothing))


def set_weight(
    connection: Connection, backend: Backend, group_key: str, weight: float | None
) -> None:
    """Set the weight of a group for all its jobs; None: each group's first job says it again."""
    groups = backend.tables.groups
    if weight is None:
        connection.execute(delete(groups).where(groups.c.group_key == group_key))
        return
    backend.insert_if_absent(connection, groups, [{"group_key": group_key, "weight": weight}])
    here = groups.c.group_key == group_key
    connection.execute(update(groups).where(here).values(weight=weight))


def checked_change(
    limit: Limit | None, name: str, amount: float, per: float | None, burst: int | None
) -> None:
    """Raise ConfigurationError unless a limit may have these numbers."""
    if isinstance(limit, Capacity):
        raise ConfigurationError(f"{name!r} is a capacity: its function says how much there is.")
    if per is not None and isinstance(limit, Concurrency):
        raise ConfigurationError(f"{name!r} limits how many jobs run at a time; it has no per.")
    if burst is not None and limit is not None and not isinstance(limit, RateLimit):
        raise ConfigurationError(f"{name!r} is no RateLimit; it has no burst.")
    if isinstance(limit, Concurrency):
        Concurrency(name, int(amount) if amount == int(amount) else amount)  # type: ignore[arg-type]
    else:
        RateLimit(name, amount, per=1.0 if per is None else per, burst=burst or 1)


def correct_cost(
    connection: Connection, backend: Backend, lease: Lease, cost: float, rules: LimitRules
) -> None:
    """Replace a running job's cost by what it really was, and correct the budgets that it used.

    Raises LeaseLostError if the job is no longer this worker's.
    """
    jobs = backend.tables.jobs
    names = (*LANE, "cost", "started_at", "lease_owner", "lease_token")
    row: Any = backend.wait_for_row(connection, lease.job_id, [jobs.c[name] for name in names])
    if row is None or (row.lease_owner, row.lease_token) != (lease.owner, lease.token):
        raise LeaseLostError(lease.job_id)
    connection.execute(update(jobs).where(jobs.c.id == lease.job_id).values(cost=cost))
    budgets = [use for use in rules.uses(row) if isinstance(use.limit, Budget)]
    if not budgets or cost == row.cost:
        return
    permits = open_permits(connection, backend, budgets, wait=True)
    for place, meter in permits.meters.items():
        if isinstance(meter, BudgetMeter):
            meter.correct(cost - row.cost, row.started_at)
            save_level(connection, backend, permits.rows[place], meter.level(row.started_at))


def limit_states(connection: Connection, backend: Backend, rules: LimitRules) -> list[LimitState]:
    """Return the limits that were used or that jobs wait for, by name and value."""
    limits = backend.tables.limits
    rows = {(row.name, row.value): row for row in connection.execute(select(limits))}
    live, waiting = live_permits(connection, backend), _waiting(connection, backend, rules)
    now = backend.read_clock(connection)
    found: list[LimitState] = []
    for place in sorted({*rows, *waiting}):
        limit = rules.by_name.get(place[0])
        if limit is None or (limit.key is not None and not place[1] and not waiting[place]):
            continue  # only holds what was set at runtime, or its limit is unknown here
        row = rows.get(place)
        chosen = as_set(limit, rows.get((place[0], "")))
        level = Level() if row is None else Level(row.level, row.moment)
        running = 0 if row is None else live[row.id]
        used = meter_of(chosen, level, running, now).used
        found.append(
            LimitState(*place, _kind(limit), _amount(chosen), _per(chosen), used, waiting[place])
        )
    return found


def _waiting(connection: Connection, backend: Backend, rules: LimitRules) -> Counter[Place]:
    """Count the ready jobs that have each limit."""
    jobs = backend.tables.jobs
    lanes = [jobs.c[name] for name in LANE]
    query = select(*lanes, func.count().label("jobs")).where(in_state(jobs, State.READY))
    waiting: Counter[Place] = Counter()
    rows: Sequence[Any] = connection.execute(query.group_by(*lanes)).all()
    for row in rows:
        for use in rules.uses(row):
            if not isinstance(use.limit, Capacity):
                waiting[use.place] += row.jobs
    return waiting


def _row_of(connection: Connection, backend: Backend, name: str) -> int:
    """Return the id of the row that holds what was set for a limit, making it if need be."""
    limits = backend.tables.limits
    backend.insert_if_absent(connection, limits, [{"name": name, "value": ""}])
    query = select(limits.c.id).where(limits.c.name == name, limits.c.value == "")
    return int(connection.execute(query).scalar_one())


def _kind(limit: Limit) -> str:
    return {Concurrency: "concurrency", RateLimit: "rate", Budget: "budget"}[type(limit)]


def _amount(limit: Limit) -> float:
    return limit.most if isinstance(limit, Concurrency) else limit.amount  # type: ignore[attr-defined]


def _per(limit: Limit) -> float | None:
    return getattr(limit, "per", None)

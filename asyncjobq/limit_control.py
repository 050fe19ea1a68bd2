"""What people change at runtime: limits and the weights of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select, update

from asyncjobq.backends.base import Backend
from asyncjobq.errors import ConfigurationError
from asyncjobq.lease import Lease, loss_of, still_ours
from asyncjobq.limit_rules import LimitRules, Use
from asyncjobq.limits import Budget, Capacity, Concurrency, Limit, RateLimit
from asyncjobq.meters import BudgetMeter
from asyncjobq.models import LANE
from asyncjobq.permits import open_permits, save_level
from asyncjobq.transition import fence, fence_values


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


def correct_cost_once(
    connection: Connection, backend: Backend, lease: Lease, cost: float, rules: LimitRules
) -> bool:
    """Replace a running job's cost by what it really was, and correct the budgets that it used.

    False if somebody holds the job's row: it may be this very handler, in a session, and waiting
    would be for ever. Raises LeaseLostError if the job is no longer this worker's.
    """
    jobs = backend.tables.jobs
    columns = [jobs.c[name] for name in (*LANE, "cost", "started_at")]
    ours = (jobs.c.lease_owner == lease.owner, jobs.c.lease_token == lease.token)
    row: Any = next(iter(backend.lock_rows(connection, [lease.job_id], columns, *ours)), None)
    if row is None:
        if still_ours(connection, backend, [lease]):
            return False
        raise loss_of(connection, backend, lease)
    statement = update(jobs).where(fence(backend.tables)).values(cost=bindparam("new_cost"))
    connection.execute(statement, {**fence_values(lease.row), "new_cost": cost})
    budgets = [use for use in rules.uses(row) if isinstance(use.limit, Budget)]
    if budgets and cost != row.cost:
        _correct(connection, backend, budgets, row, cost)
    return True


def _correct(
    connection: Connection, backend: Backend, budgets: Sequence[Use], row: Any, cost: float
) -> None:
    permits = open_permits(connection, backend, budgets, wait=True)
    for place, meter in permits.meters.items():
        if isinstance(meter, BudgetMeter):
            meter.correct(cost - row.cost, row.started_at)
            save_level(connection, backend, permits.rows[place], meter.level(row.started_at))


def _row_of(connection: Connection, backend: Backend, name: str) -> int:
    """Return the id of the row that holds what was set for a limit, making it if need be."""
    limits = backend.tables.limits
    backend.insert_if_absent(connection, limits, [{"name": name, "value": ""}])
    query = select(limits.c.id).where(limits.c.name == name, limits.c.value == "")
    return int(connection.execute(query).scalar_one())

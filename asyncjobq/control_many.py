"""Cancel and run again by filter, a bounded number of jobs a call.

A series of calls goes through the jobs in the order of their ids, up to the last that there was
when it began. Jobs that somebody holds are gone round, and taken one by one at its end. A call
changes nothing of the series that it is given, since its transaction may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, func, select

from asyncjobq.backends.base import Backend
from asyncjobq.control import (
    RETRIED,
    Cancelled,
    cancel_job,
    cancel_locked,
    columns_of,
    reopen_locked,
    retry_job,
)
from asyncjobq.enqueue import TOPIC
from asyncjobq.errors import ConfigurationError, InvalidJobError, JobNotFoundError
from asyncjobq.inspection import Filter
from asyncjobq.revival import ended_above, refuse_old_snapshot, seen_as_it_is
from asyncjobq.states import OPEN, Kind, State

ROWS: Final = 500


@dataclass(frozen=True)
class Series:
    """Which jobs a series of calls is about, and where it stands."""

    wanted: Filter
    after: int = 0
    last: int | None = None
    """The last id that it goes to; None before the first call."""
    passed: bool = False
    """Whether only those are left that somebody held."""
    held: tuple[int, ...] = ()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to do."""
        return self.passed and not self.held


def to_cancel(wanted: Filter) -> Series:
    """Begin a series of cancelling; raises ConfigurationError for what fits no open job, or all."""
    if wanted == Filter():
        raise ConfigurationError(
            "cancel_many() without a filter would cancel all that there is; name a state, type, "
            "queue or group_key (state=... of all open states, if all is meant)."
        )
    _refuse_others(wanted, OPEN, "Jobs that have ended cannot be cancelled")
    return Series(wanted)


def to_retry(wanted: Filter) -> Series:
    """Begin a series of retrying; raises ConfigurationError for states that are not retried."""
    _refuse_others(wanted, RETRIED, "Only failed and cancelled jobs are run again")
    return Series(wanted)


def _refuse_others(wanted: Filter, fit: frozenset[State], reason: str) -> None:
    others = set(wanted.states or ()) - fit
    if others:
        raise ConfigurationError(f"{reason}, so state={min(others)!s} matches none.")


def cancel_once(
    connection: Connection, backend: Backend, series: Series, limit: int = ROWS
) -> tuple[dict[int, Cancelled], Series]:
    """Cancel up to `limit` more jobs; returns what was done to which, and where to go on.

    Those that are being cancelled already are not among them.
    """
    backend.begin_writing(connection)
    if series.passed:
        job_id, *held = series.held
        return _cancel_held(connection, backend, job_id), replace(series, held=tuple(held))
    jobs = backend.tables.jobs
    states = jobs.c.state.in_(series.wanted.states or sorted(OPEN))
    conditions = [*series.wanted.conditions(jobs), states, ~jobs.c.cancel_requested]
    ids, series = _next(connection, backend, series, conditions, limit)
    with seen_as_it_is(connection, backend):
        rows = backend.lock_rows(connection, ids, columns_of(backend), *conditions)
    answers = cancel_locked(connection, backend, rows)
    if answers:
        backend.notify(connection, TOPIC)
    return answers, _held(series, set(ids) - {row.id for row in rows})


def _cancel_held(connection: Connection, backend: Backend, job_id: int) -> dict[int, Cancelled]:
    try:
        answer = cancel_job(connection, backend, job_id)
    except JobNotFoundError:
        return {}
    return {} if answer is Cancelled.ENDED else {job_id: answer}


def retry_once(
    connection: Connection, backend: Backend, series: Series, limit: int = ROWS
) -> tuple[int, Series]:
    """Run up to `limit` more jobs again; returns how many, and where to go on.

    Containers are left out: they open again with what is below them.
    """
    backend.begin_writing(connection)
    if series.passed:
        job_id, *held = series.held
        return _retry_held(connection, backend, job_id), replace(series, held=tuple(held))
    jobs = backend.tables.jobs
    states = series.wanted.states or [State.FAILED]
    conditions = [
        *series.wanted.conditions(jobs),
        jobs.c.state.in_(states),
        jobs.c.kind == Kind.JOB,
    ]
    ids, series = _next(connection, backend, series, conditions, limit)
    above = ended_above(connection, backend, ids)
    wanted = {*ids, *(ancestor for found in above.values() for ancestor in found)}
    with seen_as_it_is(connection, backend):
        rows = backend.lock_rows(connection, sorted(wanted), columns_of(backend))
        refuse_old_snapshot(connection, backend, ids)
    locked = {row.id: row.state for row in rows}
    free = [job_id for job_id in ids if {job_id, *above.get(job_id, ())} <= locked.keys()]
    chosen = [job_id for job_id in free if locked[job_id] in states]
    conflicts = reopen_locked(connection, backend, chosen)
    return len(set(chosen) - conflicts.keys()), _held(series, set(ids) - set(free))


def _retry_held(connection: Connection, backend: Backend, job_id: int) -> int:
    try:
        retry_job(connection, backend, job_id)
    except (JobNotFoundError, InvalidJobError):  # it went meanwhile, or runs again
        return 0
    return 1


def _next(
    connection: Connection,
    backend: Backend,
    series: Series,
    conditions: Sequence[ColumnElement[bool]],
    limit: int,
) -> tuple[list[int], Series]:
    """Return the next ids of the series, and the series behind them."""
    jobs = backend.tables.jobs
    last = series.last
    if last is None:
        last = connection.scalar(select(func.max(jobs.c.id))) or 0
    query = select(jobs.c.id).where(jobs.c.id > series.after, jobs.c.id <= last, *conditions)
    ids: list[Any] = list(connection.scalars(query.order_by(jobs.c.id).limit(limit)))
    after = ids[-1] if ids else last
    return ids, replace(series, after=after, last=last, passed=len(ids) < limit)


def _held(series: Series, job_ids: set[int]) -> Series:
    return replace(series, held=(*series.held, *sorted(job_ids)))

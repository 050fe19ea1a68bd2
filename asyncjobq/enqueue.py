"""Rows and edges in: the one way by which jobs come into the tables.

Nothing here takes a lock on a row that exists. Jobs with upstreams are inserted blocked and
unsettled; `settle.py` decides later, in a transaction of its own, whether they may run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar, Unpack, overload

from sqlalchemy import Connection, select

from asyncjobq import codec, cycles
from asyncjobq.backends import backend_for
from asyncjobq.backends.base import Backend, chunked
from asyncjobq.callers import AsyncCaller, in_transaction_of, refuse_autocommit
from asyncjobq.drafts import Batch, Draft
from asyncjobq.errors import (
    CycleError,
    InvalidJobError,
    ParentError,
    UnknownUpstreamError,
)
from asyncjobq.job import COLUMNS, Job
from asyncjobq.models import tables_for
from asyncjobq.options import UNSET, JobOptionArgs, JobSpec
from asyncjobq.specs import as_spec, checked_args
from asyncjobq.states import TERMINAL, Kind, State

TOPIC: Final = "jobs"
"""What the notification of an enqueue says."""

R = TypeVar("R")


@overload
async def enqueue(
    session: AsyncCaller, job: JobSpec[R], /, **options: Unpack[JobOptionArgs]
) -> Job[R]: ...
@overload
async def enqueue(
    session: AsyncCaller,
    job: str,
    args: Mapping[str, Any] | None = None,
    /,
    **options: Unpack[JobOptionArgs],
) -> Job[Any]: ...
async def enqueue(
    session: AsyncCaller,
    job: JobSpec[Any] | str,
    args: Mapping[str, Any] | None = None,
    /,
    **options: Unpack[JobOptionArgs],
) -> Job[Any]:
    """Enqueue a job in the caller's transaction, without a scheduler, into the default tables.

    It exists when that transaction commits. A type given by name goes to the queue "default"
    unless one is given; its arguments are only checked to be JSON, for no handler is known here.
    """
    spec = as_spec(job, args, options)
    spec = replace(spec, args=checked_args(spec, None))

    def work(connection: Connection) -> list[Job[Any]]:
        backend = backend_for(connection.dialect, tables_for())
        return insert_jobs(connection, backend, [spec])

    return (await in_transaction_of(session, work))[0]


def insert_jobs(
    connection: Connection, backend: Backend, specs: Sequence[JobSpec[Any]]
) -> list[Job[Any]]:
    """Insert jobs and their edges in the connection's transaction; returns them in order."""
    return insert_drafts(connection, backend, [Draft(spec) for spec in specs])


def insert_drafts(
    connection: Connection,
    backend: Backend,
    drafts: Sequence[Draft],
    *,
    parent_may_be_job: bool = False,
) -> list[Job[Any]]:
    """Insert jobs and containers that may refer to each other; returns them in order.

    Raises InvalidJobError before anything is written, with the transaction still usable.
    """
    if not drafts:
        return []
    batch = Batch(drafts)
    _check(connection, backend, batch, parent_may_be_job=parent_may_be_job)
    now = backend.read_clock(connection)
    rows: dict[Draft, dict[str, Any]] = {}
    for wave in batch.waves():
        made = [_row(batch, draft, now) for draft in wave]
        batch.ids.update(zip(wave, backend.insert_jobs(connection, made), strict=True))
        rows.update(zip(wave, made, strict=True))
    backend.insert_rows(connection, backend.tables.deps, _edges(batch))
    backend.notify(connection, TOPIC)
    return [_job(batch.ids[draft], draft.spec, rows[draft]) for draft in drafts]


def _check(
    connection: Connection, backend: Backend, batch: Batch, *, parent_may_be_job: bool
) -> None:
    """Refuse what cannot be, before anything is written."""
    reason = (
        "Jobs cannot be enqueued through an AUTOCOMMIT connection: a job could start before its "
        "edges are written."
    )
    refuse_autocommit(connection, reason)
    batch.refuse_strangers()
    batch.refuse_cycles()
    parents, upstreams = batch.existing_parents(), batch.existing_upstreams()
    _check_parents(connection, backend, parents, parent_may_be_job)
    _check_upstreams(connection, backend, upstreams)
    if parents and cycles.way_round(connection, backend, upstreams, parents) is not None:
        planned = batch.existing_upstreams_below()
        for parent, below in planned.items():
            way = cycles.way_round(connection, backend, below, [parent], planned)
            if way is not None:
                raise CycleError([f"the new job, below {way[-1]}", *map(str, way)])


def _check_parents(
    connection: Connection, backend: Backend, job_ids: set[int], may_be_job: bool
) -> None:
    """See that parents take children, and hold containers open until this transaction ends.

    A plain read would not do: it may be stale, and the container close under the new child.
    """
    found = {row.id: row for row in backend.read_parents(connection, sorted(job_ids))}
    for job_id in sorted(job_ids):
        row = found.get(job_id)
        if row is None:
            raise ParentError(f"parent={job_id} does not exist.")
        if row.kind != Kind.CONTAINER and not may_be_job:
            raise ParentError(
                f"parent={job_id} is a job; only containers take children, and running jobs "
                "through ctx.add_child()."
            )
        if row.state in TERMINAL or row.cancel_requested:
            state = "is being cancelled" if row.state not in TERMINAL else f"is {row.state}"
            raise ParentError(f"parent={job_id} {state}: it takes no more children.")


def _check_upstreams(connection: Connection, backend: Backend, job_ids: Iterable[int]) -> None:
    jobs = backend.tables.jobs
    missing = set(job_ids)
    for chunk in chunked(sorted(missing), 1000):
        missing.difference_update(connection.scalars(select(jobs.c.id).where(jobs.c.id.in_(chunk))))
    if missing:
        raise UnknownUpstreamError(sorted(missing))


def _edges(batch: Batch) -> list[dict[str, Any]]:
    return [
        {
            "job_id": batch.ids[draft],
            "depends_on_id": batch.id_of(upstream.job),
            "on_failure": upstream.on_failure,
        }
        for draft in batch.drafts
        for upstream in draft.upstreams
    ]


def _row(batch: Batch, draft: Draft, now: datetime) -> dict[str, Any]:
    chosen = draft.spec.chosen
    run_after = _moment(chosen.run_after, now)
    return {
        "queue": draft.spec.queue,
        "type": draft.spec.type,
        "kind": draft.kind,
        "name": chosen.name,
        "args": codec.encode(draft.spec.args),
        "state": _first_state(batch, draft, run_after, now),
        "parent_id": None if draft.parent is None else batch.id_of(draft.parent),
        "child_key": draft.child_key,
        "group_key": chosen.group_key,
        "weight": float(chosen.weight),
        "priority": chosen.priority,
        "limit_key": draft.spec.limit_key,
        "cost": float(chosen.cost),
        "run_after": run_after,
        "timeout": None if chosen.timeout is UNSET else chosen.timeout,
        "max_attempts": chosen.max_attempts,
        "fail_fast": draft.fail_fast,
        "meta": None if chosen.meta is None else codec.encode(chosen.meta),
        "settled": batch.is_settled(draft),
        "created_at": now,
        "updated_at": now,
    }


def _moment(run_after: Any, now: datetime) -> datetime | None:
    try:
        return now + run_after if isinstance(run_after, timedelta) else run_after
    except OverflowError as error:
        raise InvalidJobError(f"run_after={run_after!r} ends beyond the calendar.") from error


def _first_state(batch: Batch, draft: Draft, run_after: datetime | None, now: datetime) -> State:
    if batch.is_held(draft):
        return State.BLOCKED
    if draft.kind is Kind.CONTAINER:
        return State.WAITING
    return State.SCHEDULED if run_after is not None and run_after > now else State.READY


def _job(job_id: int, spec: JobSpec[Any], row: Mapping[str, Any]) -> Job[Any]:
    values = {name: row[name] for name in row.keys() & set(COLUMNS)}
    return Job(id=job_id, **{**values, "args": spec.args, "meta": spec.chosen.meta})

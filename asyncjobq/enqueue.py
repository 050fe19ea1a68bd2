"""Rows and edges in: the one way by which jobs come into the tables.

Nothing here takes a lock on a row that exists. Jobs with upstreams are inserted blocked and
unsettled; `settle.py` decides later, in a transaction of its own, whether they may run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar, Unpack, overload

from sqlalchemy import Connection

from asyncjobq import cycles, unique
from asyncjobq.backends import backend_for
from asyncjobq.backends.base import Backend
from asyncjobq.callers import AsyncCaller, in_transaction_of, refuse_autocommit
from asyncjobq.drafts import Batch, Draft
from asyncjobq.errors import (
    CycleError,
    ParentError,
    UnknownUpstreamError,
)
from asyncjobq.job import Job
from asyncjobq.models import tables_for
from asyncjobq.options import JobOptionArgs, JobSpec
from asyncjobq.rows import job_of, row_of
from asyncjobq.specs import as_spec, checked_args
from asyncjobq.states import TERMINAL, Kind

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
    if any(map(unique.has_key, drafts)):
        return _insert_unique(connection, backend, drafts, parent_may_be_job)
    batch = Batch(drafts)
    _check(connection, backend, batch, parent_may_be_job=parent_may_be_job)
    now = backend.read_clock(connection)
    made = _insert(connection, backend, batch, lambda draft: row_of(batch, draft, now))
    return [made[draft] for draft in drafts]


def _insert_unique(
    connection: Connection, backend: Backend, drafts: Sequence[Draft], parent_may_be_job: bool
) -> list[Job[Any]]:
    """Insert drafts some of which have unique keys; jobs that exist stand for some of them."""
    _check_alone(connection, backend, Batch(drafts))
    with unique.guarded(connection, backend, unique.keys_of(drafts)):
        plan = unique.decide(connection, backend, drafts)
        batch = plan.batch(drafts)
        _check(connection, backend, batch, parent_may_be_job=parent_may_be_job)
        now = backend.read_clock(connection)
        unique.write(connection, backend, plan, now)

        def row_with_key(draft: Draft) -> dict[str, Any]:
            return {**row_of(batch, draft, now), **unique.columns_of(draft, now)}

        made = _insert(connection, backend, batch, row_with_key)
        held = {job.id: job.unique_key for job in made.values() if job.unique_key is not None}
        backend.note_keys(connection, held)
        found = unique.read_existing(connection, backend, plan)
    return plan.results(drafts, made, found)


def _insert(
    connection: Connection, backend: Backend, batch: Batch, row: Callable[[Draft], dict[str, Any]]
) -> dict[Draft, Job[Any]]:
    rows: dict[Draft, dict[str, Any]] = {}
    for wave in batch.waves():
        made = [row(draft) for draft in wave]
        batch.ids.update(zip(wave, backend.insert_jobs(connection, made), strict=True))
        rows.update(zip(wave, made, strict=True))
    backend.insert_rows(connection, backend.tables.deps, _edges(batch))
    backend.notify(connection, TOPIC)
    return {draft: job_of(batch.ids[draft], draft.spec, rows[draft]) for draft in batch.drafts}


def _check(
    connection: Connection, backend: Backend, batch: Batch, *, parent_may_be_job: bool
) -> None:
    """Refuse what cannot be, before anything is written."""
    _check_alone(connection, backend, batch)
    parents, upstreams = batch.existing_parents(), batch.existing_upstreams()
    _check_parents(connection, backend, parents, parent_may_be_job)
    _check_upstreams(connection, backend, upstreams)
    if parents and upstreams:
        below = batch.existing_upstreams_below()
        if (way := cycles.way_round(connection, backend, below)) is not None:
            raise CycleError([f"the new job, below {way[-1]}", *map(str, way)])


def _check_alone(connection: Connection, backend: Backend, batch: Batch) -> None:
    """Refuse what can be seen without a look at the tables."""
    reason = (
        "Jobs cannot be enqueued through an AUTOCOMMIT connection: a job could start before its "
        "edges are written."
    )
    refuse_autocommit(connection, backend, reason)
    batch.refuse_strangers()
    batch.refuse_cycles()


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


def _check_upstreams(connection: Connection, backend: Backend, job_ids: set[int]) -> None:
    if missing := job_ids - backend.keep_existing(connection, job_ids):
        raise UnknownUpstreamError(sorted(missing))


def _edges(batch: Batch) -> list[dict[str, Any]]:
    edges = [
        {
            "job_id": batch.ids[draft],
            "depends_on_id": batch.id_of(upstream.job),
            "on_failure": upstream.on_failure,
        }
        for draft in batch.drafts
        for upstream in draft.upstreams
    ]
    return unique.edges_once(edges) if batch.has_twins else edges

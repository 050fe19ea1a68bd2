"""Rows and edges in: the one way by which jobs come into the tables.

Nothing here takes a lock on a row that exists. Jobs with upstreams are inserted blocked and
unsettled; `settle.py` decides later, in a transaction of its own, whether they may run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar, Unpack, overload

from sqlalchemy import Connection, select

from asyncjobq import codec
from asyncjobq.backends import backend_for
from asyncjobq.backends.base import Backend, chunked
from asyncjobq.callers import AsyncCaller, in_transaction_of
from asyncjobq.errors import (
    ArgumentsError,
    ConfigurationError,
    InvalidJobError,
    UnknownUpstreamError,
)
from asyncjobq.job import UNSET, Job, JobOptionArgs, JobSpec
from asyncjobq.models import tables_for
from asyncjobq.states import Kind, State

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
        return insert_for_caller(connection, backend, [spec])

    return (await in_transaction_of(session, work))[0]


def as_spec(
    job: JobSpec[Any] | str, args: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> JobSpec[Any]:
    """Return what to enqueue, given as a spec, or as a type's name and its arguments."""
    if isinstance(job, str):
        spec: JobSpec[Any] = JobSpec(job, {} if args is None else _plain_dict(args))
    elif isinstance(job, JobSpec) and args is None:
        spec = job
    else:
        raise InvalidJobError(
            f"enqueue() takes handler.job(...), or a type's name and a dict, not {job!r}"
            + (" with a separate dict of arguments." if args is not None else ".")
        )
    return spec.options(**options) if options else spec


def _plain_dict(args: Any) -> Any:
    return dict(args) if isinstance(args, Mapping) else args  # JobSpec says what is wrong with it


def insert_for_caller(
    connection: Connection, backend: Backend, specs: Sequence[JobSpec[Any]]
) -> list[Job[Any]]:
    """Insert jobs in a transaction that is the caller's, if it is one."""
    of_engine = getattr(connection.dialect, "_on_connect_isolation_level", None)
    if connection.get_execution_options().get("isolation_level", of_engine) == "AUTOCOMMIT":
        raise ConfigurationError(
            "Jobs cannot be enqueued through an AUTOCOMMIT connection: a job could start before "
            "its edges are written. Use a connection or session that has transactions."
        )
    return insert_jobs(connection, backend, specs)


def insert_jobs(
    connection: Connection, backend: Backend, specs: Sequence[JobSpec[Any]]
) -> list[Job[Any]]:
    """Insert jobs and their edges in the connection's transaction; returns them in order.

    Raises UnknownUpstreamError before anything is written.
    """
    if not specs:
        return []
    _check_upstreams(connection, backend, specs)
    now = backend.read_clock(connection)
    rows = [_row(spec, now) for spec in specs]
    ids = backend.insert_jobs(connection, rows)
    _insert_edges(connection, backend, specs, ids)
    backend.notify(connection, TOPIC)
    return [_job(*made) for made in zip(ids, specs, rows, strict=True)]


def checked_args(spec: JobSpec[Any], encode: Callable[[Mapping[str, Any]], Any] | None) -> Any:
    """Return the arguments as they are stored; `encode` is the handler's, where it is known."""
    try:
        args = spec.args if encode is None else encode(spec.args)
        codec.check_size(codec.encode(args), codec.MAX_BYTES)
    except ValueError as error:
        if isinstance(error, ArgumentsError):
            raise
        raise ArgumentsError(
            f"The arguments of {spec.type!r} cannot be stored: {error}."
        ) from error
    return args


def _check_upstreams(
    connection: Connection, backend: Backend, specs: Sequence[JobSpec[Any]]
) -> None:
    jobs = backend.tables.jobs
    named = list(dict.fromkeys(job_id for spec in specs for job_id in _upstreams(spec)))
    missing = set(named)
    for chunk in chunked(named, 1000):
        missing.difference_update(connection.scalars(select(jobs.c.id).where(jobs.c.id.in_(chunk))))
    if missing:
        raise UnknownUpstreamError(sorted(missing))


def _upstreams(spec: JobSpec[Any]) -> tuple[int, ...]:
    return spec.chosen.depends_on  # type: ignore[return-value]  # ids since JobOptions was made


def _insert_edges(
    connection: Connection, backend: Backend, specs: Sequence[JobSpec[Any]], ids: Sequence[int]
) -> None:
    edges = [
        {"job_id": job_id, "depends_on_id": upstream}
        for job_id, spec in zip(ids, specs, strict=True)
        for upstream in _upstreams(spec)
    ]
    backend.insert_rows(connection, backend.tables.deps, edges)


def _row(spec: JobSpec[Any], now: datetime) -> dict[str, Any]:
    chosen = spec.chosen
    run_after = _moment(chosen.run_after, now)
    blocked = bool(chosen.depends_on)
    return {
        "queue": spec.queue,
        "type": spec.type,
        "kind": Kind.JOB,
        "name": chosen.name,
        "args": codec.encode(spec.args),
        "state": _first_state(blocked, run_after, now),
        "group_key": chosen.group_key,
        "weight": float(chosen.weight),
        "priority": chosen.priority,
        "cost": float(chosen.cost),
        "run_after": run_after,
        "timeout": None if chosen.timeout is UNSET else chosen.timeout,
        "max_attempts": chosen.max_attempts,
        "meta": None if chosen.meta is None else codec.encode(chosen.meta),
        "settled": not blocked,
        "created_at": now,
        "updated_at": now,
    }


def _moment(run_after: Any, now: datetime) -> datetime | None:
    try:
        return now + run_after if isinstance(run_after, timedelta) else run_after
    except OverflowError as error:
        raise InvalidJobError(f"run_after={run_after!r} ends beyond the calendar.") from error


def _first_state(blocked: bool, run_after: datetime | None, now: datetime) -> State:
    if blocked:
        return State.BLOCKED
    return State.SCHEDULED if run_after is not None and run_after > now else State.READY


def _job(job_id: int, spec: JobSpec[Any], row: Mapping[str, Any]) -> Job[Any]:
    values = {name: value for name, value in row.items() if name != "settled"}
    return Job(id=job_id, **{**values, "args": spec.args, "meta": spec.chosen.meta})

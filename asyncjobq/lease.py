"""A lease's whole life: claim, renew, reclaim.

A lease is the triple of job id, owner and token. Every write on its behalf is fenced by all three,
so an owner that comes back late changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    case,
    func,
    literal,
    literal_column,
    null,
    select,
    tuple_,
    update,
)

from asyncjobq import ready
from asyncjobq.attempts import Unsuccessful, keep_attempts
from asyncjobq.backends.base import Backend, Take, chunked
from asyncjobq.codec import Encoded
from asyncjobq.column_types import Key
from asyncjobq.errors import LeaseLostError
from asyncjobq.outcomes import Ending, Failure
from asyncjobq.states import State, UniqueWhile
from asyncjobq.transition import (
    End,
    Locked,
    Return,
    end_jobs,
    fence,
    fence_values,
    return_jobs,
)

NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})
WORKER_LOST: Final = (
    "The worker was lost (its lease ran out) in attempt {attempt} of {max_attempts}. A job whose "
    "process dies is run again until its attempts are used up."
)


class Lease(NamedTuple):
    """The right to run one job until it expires; `owner` and `token` fence its writes."""

    job_id: int
    owner: str
    token: int

    @property
    def row(self) -> Locked:
        """The job's row as it is while the lease stands: what its writes are fenced by."""
        return Locked(self.job_id, self.owner, self.token)


class Claimed(NamedTuple):
    """A job that this worker has leased; `args` and `meta` are still JSON text.

    Its fields are in the order of `claim_columns`.
    """

    lease: Lease
    queue: str
    type: str
    limit_key: str
    args: str
    group_key: str
    weight: float
    attempt: int
    max_attempts: int
    timeout: float
    created_at: datetime
    started_at: datetime
    meta: str | None = None
    checkpoint: str | None = None
    """What an earlier attempt has stored, as JSON text."""


@dataclass(frozen=True)
class Defaults:
    """What a claim fills in where a job says nothing: by type, and for all other types."""

    max_attempts: Mapping[str, int]
    timeout: Mapping[str, float]
    cost: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})

    def __hash__(self) -> int:
        """Equal ones share the statements that are built for them."""
        return hash((tuple(sorted(self.max_attempts.items())), tuple(sorted(self.timeout.items()))))


@dataclass
class Renewal:
    """What became of each lease in a renewal."""

    renewed: set[Lease] = field(default_factory=set)
    lost: set[Lease] = field(default_factory=set)
    held: set[Lease] = field(default_factory=set)
    """Rows that some transaction has locked: still ours, to be renewed soon."""
    cancel_requested: set[Lease] = field(default_factory=set)


def claim_once(
    connection: Connection,
    backend: Backend,
    owner: str,
    takes: Sequence[Take],
    ttl: float,
    defaults: Defaults,
) -> list[Claimed]:
    """Lease up to the asked number of jobs, for `ttl` seconds, in one atomic transaction."""
    values = claim_values(backend, owner, ttl, defaults)
    conditions, columns = backend.built(ready.conditions), claim_columns(backend)
    rows = backend.claim(connection, takes, conditions, values, columns)
    return [claimed_from(row, owner) for row in rows]


def claim_values(backend: Backend, owner: str, ttl: float, defaults: Defaults) -> dict[str, Any]:
    """Return what a claim writes."""
    return backend.built(_claim_values, owner, ttl, defaults)


def claim_columns(backend: Backend) -> list[ColumnElement[Any]]:
    """Return what a claim reads of each job."""
    return backend.built(_claim_columns)


def _claim_values(backend: Backend, owner: str, ttl: float, defaults: Defaults) -> dict[str, Any]:
    jobs = backend.tables.jobs
    return {
        "state": State.LEASED,
        "in_flight": True,
        "lease_owner": owner,
        "lease_token": jobs.c.lease_token + 1,
        "lease_expires": backend.now(ttl),
        "heartbeat_at": backend.now(),
        "attempt": jobs.c.attempt + 1,
        "max_attempts": _filled_in(jobs.c.max_attempts, jobs.c.type, defaults.max_attempts),
        "timeout": _filled_in(jobs.c.timeout, jobs.c.type, defaults.timeout),
        "cost": _filled_in(jobs.c.cost, jobs.c.type, defaults.cost),
        "started_at": backend.now(),
        "updated_at": backend.now(),
        "unique_held": case(
            (jobs.c.unique_while == literal_column(f"'{UniqueWhile.WAITING}'", Key(16)), null()),
            else_=jobs.c.unique_held,
        ),
    }


def _claim_columns(backend: Backend) -> list[ColumnElement[Any]]:
    jobs = backend.tables.jobs
    return [
        *(jobs.c[name] for name in ("id", "lease_token", "queue", "type", "limit_key")),
        # As text: a row whose arguments cannot be decoded must fail alone, not spoil the claim.
        backend.text_of(jobs.c.args).label("args"),
        *(jobs.c[name] for name in ("group_key", "weight", "attempt", "max_attempts", "timeout")),
        *(jobs.c[name] for name in ("created_at", "started_at")),
        backend.text_of(jobs.c.meta).label("meta"),
        backend.text_of(jobs.c.checkpoint).label("checkpoint"),
    ]


_CLAIM_COLUMNS: Final = len(Claimed._fields) + 1  # a lease is made of two


def claimed_from(row: Any, owner: str) -> Claimed:
    """Return the claimed job of a row that begins with `claim_columns`."""
    job_id, token, *others = row[:_CLAIM_COLUMNS]
    return Claimed(Lease(job_id, owner, token), *others)


def renew_once(
    connection: Connection,
    backend: Backend,
    leases: Sequence[Lease],
    ttl: float,
    progress: Mapping[Lease, Encoded] = NOTHING,
) -> Renewal:
    """Extend leases by `ttl` seconds from now; says which are lost and which are to be cancelled.

    Rows that another transaction holds are skipped: waiting for one would let all others expire.
    What handlers have reported of their `progress` goes with it.
    """
    jobs = backend.tables.jobs
    # A handler that was given up may still be here when its job comes back.
    by_id = {lease.job_id: lease for lease in sorted(leases, key=lambda lease: lease.token)}
    renewal = Renewal(lost=set(leases) - set(by_id.values()))
    columns = [jobs.c.id, jobs.c.lease_owner, jobs.c.lease_token, jobs.c.cancel_requested]
    rows = backend.lock_rows(connection, list(by_id), columns, jobs.c.in_flight)
    for row in rows:
        lease = by_id.pop(row.id)
        owned = (row.lease_owner, row.lease_token) == (lease.owner, lease.token)
        (renewal.renewed if owned else renewal.lost).add(lease)
        if owned and row.cancel_requested:
            renewal.cancel_requested.add(lease)
    extend(connection, backend, renewal.renewed, ttl)
    renewal.held = still_ours(connection, backend, list(by_id.values()))
    renewal.lost |= set(by_id.values()) - renewal.held
    reported = {lease: value for lease, value in progress.items() if lease in renewal.renewed}
    store_progress(connection, backend, reported)
    return renewal


def store_progress(
    connection: Connection, backend: Backend, progress: Mapping[Lease, Encoded]
) -> None:
    """Store how far locked jobs are."""
    if not progress:
        return
    jobs = backend.tables.jobs
    value = bindparam("new_progress", type_=jobs.c.progress.type)
    statement = update(jobs).where(fence(backend.tables)).values(progress=value)
    rows = [
        {**fence_values(lease.row), "new_progress": text}
        for lease, text in sorted(progress.items(), key=lambda item: item[0].job_id)
    ]
    connection.execute(statement, rows)


def completed_among(
    connection: Connection, backend: Backend, leases: Collection[Lease]
) -> dict[Lease, State]:
    """Return the leases that `completion.py` has ended, with the states that it gave their jobs.

    Nothing else leaves a job done, or waiting without an error, under a token still the lease's.
    """
    jobs = backend.tables.jobs
    by_id = {lease.job_id: lease for lease in sorted(leases, key=lambda lease: lease.token)}
    found: dict[Lease, State] = {}
    for chunk in chunked(list(by_id), 500):
        query = select(jobs.c.id, jobs.c.lease_token, jobs.c.state).where(
            jobs.c.id.in_(chunk),
            ~jobs.c.in_flight,
            jobs.c.state.in_([State.DONE, State.WAITING]),
            jobs.c.error.is_(None),
        )
        for row in connection.execute(query):
            if row.lease_token == by_id[row.id].token:
                found[by_id[row.id]] = State(row.state)
    return found


def loss_of(connection: Connection, backend: Backend, lease: Lease) -> LeaseLostError:
    """Return what to raise for a lease that is gone, which says if its own handler has ended it."""
    over = bool(completed_among(connection, backend, [lease]))
    return LeaseLostError(lease.job_id, over=over)


def still_ours(connection: Connection, backend: Backend, leases: Collection[Lease]) -> set[Lease]:
    """Return the leases whose fence still stands, without locking anything."""
    return _standing(connection, backend, leases)


def asked_to_end(connection: Connection, backend: Backend, leases: Collection[Lease]) -> set[Lease]:
    """Return the leases whose jobs are to be cancelled, without locking anything."""
    return _standing(connection, backend, leases, backend.tables.jobs.c.cancel_requested)


def _standing(
    connection: Connection,
    backend: Backend,
    leases: Collection[Lease],
    *conditions: ColumnElement[bool],
) -> set[Lease]:
    jobs = backend.tables.jobs
    # A handler that was given up may still be here when its job comes back.
    by_id = {lease.job_id: lease for lease in sorted(leases, key=lambda lease: lease.token)}
    found: set[Lease] = set()
    for chunk in chunked(list(by_id), 500):
        query = select(jobs.c.id, jobs.c.lease_owner, jobs.c.lease_token).where(
            jobs.c.id.in_(chunk), jobs.c.in_flight, *conditions
        )
        for row in connection.execute(query):
            lease = by_id[row.id]
            if (row.lease_owner, row.lease_token) == (lease.owner, lease.token):
                found.add(lease)
    return found


def reclaim_once(connection: Connection, backend: Backend, limit: int = 500) -> list[End | Return]:
    """Take back expired leases: to `ready`, or to an end if that was asked or attempts are up."""
    jobs = backend.tables.jobs
    expired = jobs.c.lease_expires < backend.now()
    candidates = select(jobs.c.id).where(jobs.c.in_flight, expired)
    ids = list(connection.scalars(candidates.order_by(jobs.c.id).limit(limit)))
    if not ids:
        return []
    columns = [jobs.c.id, jobs.c.lease_owner, jobs.c.lease_token, jobs.c.cancel_requested]
    columns += [jobs.c.attempt, jobs.c.max_attempts]
    rows = backend.lock_rows(connection, ids, columns, jobs.c.in_flight, expired, ending=True)
    taken = [_taken_back(row) for row in rows]
    keep_attempts(connection, backend, [_lost(item) for item in taken])
    end_jobs(connection, backend, [item for item in taken if isinstance(item, End)])
    return_jobs(connection, backend, [item for item in taken if isinstance(item, Return)])
    return taken


def _taken_back(row: Any) -> End | Return:
    locked = Locked.of(row)
    if row.cancel_requested:
        return End(locked, State.CANCELLED, error="cancelled on request; its worker was lost")
    if row.max_attempts is not None and row.attempt >= row.max_attempts:
        lost = WORKER_LOST.format(attempt=row.attempt, max_attempts=row.max_attempts)
        return End(locked, State.FAILED, error=lost)
    return Return(locked)


def _lost(item: End | Return) -> Unsuccessful:
    failure = Failure(message=item.error or "The worker was lost: its lease ran out.")
    return Unsuccessful(item.row.id, item.row.owner, Ending.LEASE_LOST, failure)


def extend(connection: Connection, backend: Backend, leases: Collection[Lease], ttl: float) -> None:
    """Write new expiry times for leases whose rows are locked and were compared, fenced anyway."""
    jobs = backend.tables.jobs
    for chunk in chunked(sorted(leases, key=lambda lease: lease.job_id), 500):
        connection.execute(
            update(jobs)
            .where(jobs.c.id.in_([lease.job_id for lease in chunk]), _fence(jobs, chunk))
            .values(state=State.RUNNING, lease_expires=backend.now(ttl), heartbeat_at=backend.now())
        )


def _fence(jobs: Table, leases: Sequence[Lease]) -> ColumnElement[bool]:
    """Return the fence of leases; most have one owner and one token, and else it costs more."""
    columns = (jobs.c.lease_owner, jobs.c.lease_token)
    if len(marks := {(lease.owner, lease.token) for lease in leases}) == 1:
        return and_(*(column == mark for column, mark in zip(columns, *marks, strict=True)))
    whole = [(lease.job_id, lease.owner, lease.token) for lease in leases]
    return tuple_(jobs.c.id, *columns).in_(whole)


def _filled_in(
    column: ColumnElement[Any], type_column: ColumnElement[str], defaults: Mapping[str, Any]
) -> ColumnElement[Any]:
    """Return the column's value, or where it is NULL the default of the row's type."""
    if len(set(defaults.values())) == 1:
        fallback: ColumnElement[Any] = literal(next(iter(defaults.values())), column.type)
    else:
        typed = {name: literal(value, column.type) for name, value in defaults.items()}
        fallback = case(typed, value=type_column)
    return func.coalesce(column, fallback, type_=column.type)

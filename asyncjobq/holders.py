"""Who holds a unique key, such that it stays true until the caller's transaction ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, update

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.errors import StaleSnapshotError
from asyncjobq.states import NOT_STARTED, Kind, UniqueWhile


@dataclass(frozen=True, slots=True)
class Holder:
    """The job that holds a key."""

    id: int
    past: bool
    """Whether it does so only because nobody has asked since its period ended."""
    leaves_at_start: bool
    replaceable: bool
    """Whether it is a job, and not a workflow, and has never been started."""


def holders_for(
    connection: Connection, backend: Backend, keys: Sequence[str], replacing: set[str]
) -> dict[str, Holder]:
    """Return who holds keys, and goes on to hold them; all others are ours to take.

    A job that leaves its key at its start is kept from being started before this transaction ends,
    so that it sees what its caller writes here.
    """
    latest = backend.reads_committed(connection)
    found: dict[str, Holder] = {}
    if latest and not backend.one_writer:
        # Whoever only finds out that the job is there waits for nobody.
        found = holders_of(connection, backend, keys)
        found = {k: one for k, one in found.items() if not one.past and k not in replacing}
        if len(found) < len(keys):  # slots are locked first, always
            found = {k: one for k, one in found.items() if not one.leaves_at_start}
        found = _kept(connection, backend, found, wait=False)
    missing = [key for key in keys if key not in found]
    if missing:
        backend.lock_keys(connection, missing)
        others = holders_of(connection, backend, missing)
        if not latest:
            others = _current(connection, backend, others)
        others = _replaceable(connection, backend, others, replacing, latest=latest)
        found |= _kept(connection, backend, others, wait=True)
    return found


def holders_of(connection: Connection, backend: Backend, keys: Sequence[str]) -> dict[str, Holder]:
    """Return who holds keys, as this transaction sees it."""
    jobs = backend.tables.jobs
    columns = [jobs.c[name] for name in ("id", "kind", "state", "lease_token")]
    columns += [jobs.c.unique_held, jobs.c.unique_while]
    past = (jobs.c.unique_until <= backend.now()).label("past")
    query = select(*columns, past)
    found: dict[str, Holder] = {}
    for chunk in chunked(keys, 1000):
        for row in connection.execute(query.where(backend.holds(connection, chunk))):
            found[row.unique_held] = Holder(
                row.id,
                past=bool(row.past),
                leaves_at_start=row.unique_while == UniqueWhile.WAITING,
                replaceable=_is_replaceable(row),
            )
    return found


def _is_replaceable(row: Any) -> bool:
    never_started = row.lease_token == 0 and row.state in NOT_STARTED
    return never_started and row.kind == Kind.JOB


def _kept(
    connection: Connection, backend: Backend, found: Mapping[str, Holder], *, wait: bool
) -> dict[str, Holder]:
    """Return the holders, without those that have just been started and so left their keys."""
    leaving = {one.id: key for key, one in found.items() if one.leaves_at_start}
    kept = backend.keep_holders(connection, leaving, wait=wait) if leaving else set()
    return {key: one for key, one in found.items() if not one.leaves_at_start or one.id in kept}


def _current(
    connection: Connection, backend: Backend, found: Mapping[str, Holder]
) -> dict[str, Holder]:
    """Return those of a snapshot's holders that are so still."""
    holding = {one.id: key for key, one in found.items() if not one.past}
    still = backend.still_holders(connection, holding) if holding else set()
    return {key: one for key, one in found.items() if one.past or one.id in still}


def _replaceable(
    connection: Connection,
    backend: Backend,
    found: Mapping[str, Holder],
    replacing: set[str],
    *,
    latest: bool,
) -> dict[str, Holder]:
    """Lock the holders that are to be replaced; look again at those that were just started."""
    jobs = backend.tables.jobs
    conditions = (jobs.c.lease_token == 0, jobs.c.state.in_(sorted(NOT_STARTED)))
    wanted = {
        one.id: key
        for key, one in found.items()
        if key in replacing and one.replaceable and not one.past
    }
    rows = backend.lock_rows(connection, list(wanted), [jobs.c.id], *conditions)
    for job_id in sorted(wanted.keys() - {row.id for row in rows}):
        if backend.wait_to_lock(connection, job_id, *conditions):
            continue
        key = wanted[job_id]
        if not latest:
            raise StaleSnapshotError([key])
        found = {k: one for k, one in found.items() if k != key}
        found |= holders_of(connection, backend, [key])
    return dict(found)


def release(connection: Connection, backend: Backend, past: Sequence[int]) -> None:
    """Take their keys from jobs whose periods are past."""
    jobs = backend.tables.jobs
    for chunk in chunked(sorted(past), 500):
        over = update(jobs).where(jobs.c.id.in_(chunk), jobs.c.unique_until <= backend.now())
        connection.execute(over.values(unique_held=None))
        backend.forget_keys(connection, chunk)

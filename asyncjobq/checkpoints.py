"""What a handler stores on its way, under the fence of its lease, for the attempt to come."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, update

from asyncjobq.backends.base import Backend
from asyncjobq.codec import Encoded
from asyncjobq.lease import Lease, loss_of, still_ours
from asyncjobq.transition import fence, fence_values


def store_checkpoint(
    connection: Connection, backend: Backend, lease: Lease, value: Encoded
) -> None:
    """Store a checkpoint in this transaction, which holds the job's row from here to its end.

    Waits for whoever holds the row. Raises LeaseLostError.
    """
    backend.refuse_snapshot(connection, "ctx.checkpoint()")
    if not _write(connection, backend, lease, value):
        raise loss_of(connection, backend, lease)


def checkpoint_once(connection: Connection, backend: Backend, lease: Lease, value: Encoded) -> bool:
    """Store a checkpoint in a transaction of ours; False if somebody holds the job's row.

    It may be this very handler that holds it, in a session: waiting would be for ever.
    """
    jobs = backend.tables.jobs
    if not backend.lock_rows(connection, [lease.job_id], [jobs.c.id], jobs.c.in_flight):
        if still_ours(connection, backend, [lease]):
            return False
    elif _write(connection, backend, lease, value):
        return True
    raise loss_of(connection, backend, lease)


def _write(connection: Connection, backend: Backend, lease: Lease, value: Encoded) -> bool:
    jobs = backend.tables.jobs
    new_value = bindparam("new_checkpoint", type_=jobs.c.checkpoint.type)
    values = {"checkpoint": new_value, "updated_at": backend.now()}
    statement = update(jobs).where(fence(backend.tables)).values(values)
    fenced = {**fence_values(lease.row), "new_checkpoint": value}
    return connection.execute(statement, fenced).rowcount == 1

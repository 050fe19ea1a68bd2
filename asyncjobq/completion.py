"""The end of a job inside its handler's own transaction: its effects and `done` are one commit.

That transaction may be under way for long and began we do not know when. So it touches no row but
the job's, whose neighbours are told by a settling that follows its commit: the job is always left
unsettled, for an edge that is committed meanwhile is not to be seen from here.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from asyncjobq.backends.base import Backend
from asyncjobq.codec import Encoded
from asyncjobq.context import LastWords
from asyncjobq.enqueue import TOPIC
from asyncjobq.lease import Lease, loss_of, store_progress
from asyncjobq.states import State
from asyncjobq.transition import End, end_unsettled, open_children


def complete_job(
    connection: Connection,
    backend: Backend,
    lease: Lease,
    result: Encoded,
    last: LastWords,
) -> None:
    """End the leased job as done, or as waiting if it has open children, in this transaction.

    Waits for whoever holds the job's row. Raises LeaseLostError.
    """
    backend.refuse_snapshot(connection, "ctx.complete()")
    jobs = backend.tables.jobs
    columns = [jobs.c.lease_owner, jobs.c.lease_token]
    row = backend.wait_for_row(connection, lease.job_id, columns)
    if row is None or (row.lease_owner, row.lease_token) != (lease.owner, lease.token):
        raise loss_of(connection, backend, lease)
    if last.progress is not None:
        store_progress(connection, backend, {lease: last.progress})
    waits = last.has_children and not backend.reads_fresh(connection)
    waits = waits or _has_open_children(connection, backend, lease.job_id)
    end = End(lease.row, State.DONE, result)
    end_unsettled(connection, backend, [end], waits=waits)
    backend.notify(connection, TOPIC)


def _has_open_children(connection: Connection, backend: Backend, job_id: int) -> bool:
    jobs = backend.tables.jobs
    query = select(jobs.c.id).where(jobs.c.id == job_id, open_children(backend.tables, jobs))
    return connection.scalar(query) is not None

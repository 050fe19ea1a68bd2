"""Children of a running job: added by its handler, under the fence of its lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, select

from asyncjobq.backends.base import Backend
from asyncjobq.drafts import Draft
from asyncjobq.enqueue import insert_drafts
from asyncjobq.errors import ParentError
from asyncjobq.job import COLUMNS, Job
from asyncjobq.lease import Lease, still_ours
from asyncjobq.options import JobSpec, check_text
from asyncjobq.workflow import below


def add_child(
    connection: Connection,
    backend: Backend,
    lease: Lease,
    spec: JobSpec[Any],
    key: str | None,
    on_insert: Callable[[Job[Any]], None] = lambda job: None,
) -> Job[Any]:
    """Insert a child of the leased job, or return the one that an earlier attempt gave this key.

    Raises ParentError if the lease is lost.
    """
    check_text("key", key, 255, optional=True)
    if lease not in still_ours(connection, backend, [lease]):
        raise ParentError(
            f"Job {lease.job_id} is no longer this worker's: its lease was lost, and another "
            "worker may run it. Its handler should end."
        )
    known = None if key is None else _child(connection, backend, lease.job_id, key)
    if known is not None:
        return known
    draft = Draft(below(spec, lease.job_id), child_key=key)
    child = insert_drafts(connection, backend, [draft], parent_may_be_job=True)[0]
    on_insert(child)
    return child


def _child(connection: Connection, backend: Backend, parent_id: int, key: str) -> Job[Any] | None:
    jobs = backend.tables.jobs
    query = select(*(jobs.c[name] for name in COLUMNS)).where(
        jobs.c.parent_id == parent_id, jobs.c.child_key == key
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else replace(Job.from_row(row), existing=True)

"""What a handler holds, without a worker: the context of a claimed job."""

from __future__ import annotations

from asyncjobq import JobContext
from asyncjobq.codec import MAX_BYTES
from asyncjobq.context import LeaseRef
from asyncjobq.lease import Claimed, Lease
from asyncjobq.services import HandlerServices
from conformance.kit import Jobs


def context_of(jobs: Jobs, claimed: Claimed, lease: Lease | None = None) -> JobContext:
    """Return the context of a claimed job, or of another who believes to hold its lease."""
    held = lease or claimed.lease
    services = HandlerServices(
        jobs.database, jobs.scheduler._spec, jobs.scheduler.enqueue, MAX_BYTES
    )
    return JobContext(
        job_id=claimed.lease.job_id,
        type=claimed.type,
        attempt=claimed.attempt,
        max_attempts=claimed.max_attempts,
        deadline=None,
        stored_args=claimed.args,
        lease=LeaseRef(held.job_id, held.owner, held.token),
        services=services,
        stored_checkpoint=claimed.checkpoint,
    )

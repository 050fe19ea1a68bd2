"""What is stored of a job that is new, and what its caller gets back of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from asyncjobq import codec
from asyncjobq.drafts import Batch, Draft
from asyncjobq.job import COLUMNS, Job
from asyncjobq.options import UNSET, JobSpec
from asyncjobq.states import Kind, State


def row_of(batch: Batch, draft: Draft, now: datetime) -> dict[str, Any]:
    """Return the row of a new job or container."""
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
        "cost": None if chosen.cost is None else float(chosen.cost),
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
    return now + run_after if isinstance(run_after, timedelta) else run_after


def _first_state(batch: Batch, draft: Draft, run_after: datetime | None, now: datetime) -> State:
    if batch.is_held(draft):
        return State.BLOCKED
    if draft.kind is Kind.CONTAINER:
        return State.WAITING
    return State.SCHEDULED if run_after is not None and run_after > now else State.READY


def job_of(job_id: int, spec: JobSpec[Any], row: Mapping[str, Any]) -> Job[Any]:
    """Return the job whose row was inserted under this id."""
    values = {name: row[name] for name in row.keys() & set(COLUMNS)}
    return Job(id=job_id, **{**values, "args": spec.args, "meta": spec.chosen.meta})

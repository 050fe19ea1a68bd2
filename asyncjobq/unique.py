"""Unique keys: of all jobs that ask for a key, one at a time holds it.

The holder is the row that has the key in `unique_held`, which the database allows once. The
write that ends the scope takes it out: the claim, or the end of the job. A period that is past is
ended by whoever asks next. Reclaiming and releasing never give a key back.

Whoever asks for a key first locks out all others who do, until the transaction ends; then looks
who holds it; and inserts where nobody does. So nobody ever meets a duplicate with an error, which
on some databases would end the caller's transaction. Where the transaction reads from a snapshot
that may be old, one may be met all the same, behind a savepoint: StaleSnapshotError says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, case, select, update
from sqlalchemy.exc import DBAPIError

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.drafts import Batch, Draft
from asyncjobq.errors import StaleSnapshotError, UniqueConflictError
from asyncjobq.holders import Holder, holders_for, holders_of, release
from asyncjobq.job import COLUMNS, Job, Node, OnFailure
from asyncjobq.models import in_state
from asyncjobq.options import OnConflict
from asyncjobq.rows import row_of
from asyncjobq.states import State, UniqueWhile

_REPLACED = (
    *("queue", "type", "name", "args", "limit_key", "group_key", "weight", "priority"),
    *(
        "cost",
        "run_after",
        "timeout",
        "max_attempts",
        "meta",
        "unique_while",
        "unique_until",
        "updated_at",
    ),
)


@dataclass
class Plan:
    """What becomes of the drafts of one batch; nothing of it is written yet."""

    stands_for: dict[Draft, Draft | int] = field(default_factory=dict)
    """Of a draft that is not inserted: the one that is in its place, or the job that exists."""
    replaced: dict[int, Draft] = field(default_factory=dict)
    """Jobs that take over arguments and options, and from which draft."""
    past: list[int] = field(default_factory=list)
    """Jobs whose keys are taken away, for their periods are past."""

    def batch(self, drafts: Sequence[Draft]) -> Batch:
        """Return the batch of what is to be inserted, each where its key came first."""
        known: dict[Node[Any], int] = {}
        twins: dict[Node[Any], Draft] = {}
        inserted: dict[Draft, None] = {}
        for draft in drafts:
            instead = self.stands_for.get(draft, draft)
            if isinstance(instead, Draft):
                inserted[instead] = None
                if draft.node is not None and instead is not draft:
                    twins[draft.node] = instead
            elif draft.node is not None:
                known[draft.node] = instead
        return Batch(list(inserted), known, twins)

    def results(
        self, drafts: Sequence[Draft], made: Mapping[Draft, Job[Any]], found: Mapping[int, Job[Any]]
    ) -> list[Job[Any]]:
        """Return a job for each draft, given those that were inserted and those that exist."""
        results: list[Job[Any]] = []
        seen: set[Draft] = set()
        for draft in drafts:
            instead = self.stands_for.get(draft, draft)
            if isinstance(instead, Draft):
                results.append(replace(made[instead], existing=instead in seen))
                seen.add(instead)
            else:
                results.append(found[instead])
        return results


def has_key(draft: Draft) -> bool:
    """Tell whether a draft asks for a unique key."""
    return draft.spec.chosen.unique_key is not None


def columns_of(draft: Draft, now: datetime) -> dict[str, Any]:
    """Return what a new row says about its unique key."""
    chosen = draft.spec.chosen
    period = chosen.unique_for if isinstance(chosen.unique_for, timedelta) else None
    until_then = None if chosen.unique_key is None or period is not None else chosen.unique_while
    return {
        "unique_key": chosen.unique_key,
        "unique_held": chosen.unique_key,
        "unique_while": until_then,
        "unique_until": None if period is None else now + period,
    }


@contextmanager
def guarded(connection: Connection, backend: Backend, keys: Sequence[str]) -> Iterator[None]:
    """Undo the block's writes, and raise StaleSnapshotError, if they met a holder unseen."""
    if not keys or backend.reads_committed(connection):
        yield
        return
    try:
        with backend.savepoint(connection):
            yield
    except DBAPIError as error:
        if not backend.is_stale(error):
            raise
        raise StaleSnapshotError(list(keys)) from error


def decide(connection: Connection, backend: Backend, drafts: Sequence[Draft]) -> Plan:
    """Say what becomes of drafts some of which have keys; to be called, and written, guarded.

    Keeps others from asking for the keys that are to be taken. Raises UniqueConflictError.
    """
    asked: dict[str, list[Draft]] = {}
    for draft in drafts:
        if draft.spec.chosen.unique_key is not None:
            asked.setdefault(draft.spec.chosen.unique_key, []).append(draft)
    replacing = {key for key, ones in asked.items() if any(map(_replaces, ones))}
    holders = holders_for(connection, backend, sorted(asked), replacing)
    plan = Plan()
    for key, ones in asked.items():
        _decide_key(plan, key, ones, holders.get(key))
    return plan


def keys_of(drafts: Sequence[Draft]) -> list[str]:
    """Return the keys that drafts ask for."""
    keys = (draft.spec.chosen.unique_key for draft in drafts)
    return sorted({key for key in keys if key is not None})


def write(connection: Connection, backend: Backend, plan: Plan, now: datetime) -> None:
    """Take keys from jobs whose period is past; replace arguments and options of others."""
    jobs = backend.tables.jobs
    release(connection, backend, plan.past)
    for job_id, draft in sorted(plan.replaced.items()):
        row = {**row_of(Batch([draft]), draft, now), **columns_of(draft, now)}
        values = {name: row[name] for name in _REPLACED}
        # One that waits for other jobs goes on doing so.
        state = case((in_state(jobs, State.BLOCKED), State.BLOCKED), else_=row["state"])
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values, state=state))


def read_existing(connection: Connection, backend: Backend, plan: Plan) -> dict[int, Job[Any]]:
    """Return the jobs that exist and stand for drafts, by id."""
    jobs = backend.tables.jobs
    wanted = sorted({one for one in plan.stands_for.values() if isinstance(one, int)})
    found: dict[int, Job[Any]] = {}
    for chunk in chunked(wanted, 500):
        query = select(*(jobs.c[name] for name in COLUMNS)).where(jobs.c.id.in_(chunk))
        for row in connection.execute(query):
            found[row.id] = replace(Job.from_row(row), existing=True)
    return found


def edges_once(edges: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each edge once, where several upstreams turned out to be one; the stricter counts."""
    once: dict[tuple[int, int], dict[str, Any]] = {}
    for edge in edges:
        known = once.setdefault((edge["job_id"], edge["depends_on_id"]), edge)
        if edge["on_failure"] == OnFailure.CANCEL:
            known["on_failure"] = OnFailure.CANCEL
    return list(once.values())


def keys_to_take_back(
    connection: Connection, backend: Backend, job_ids: Collection[int], above: Collection[int] = ()
) -> dict[int, str]:
    """Return the keys that ended jobs take back when they are opened again.

    Those `above` only wait for others again, and so take back no key that they lost at their start.
    """
    jobs = backend.tables.jobs
    found: dict[int, str] = {}
    for chunk in chunked(sorted(job_ids), 500):
        query = select(jobs.c.id, jobs.c.unique_key, jobs.c.unique_while).where(
            jobs.c.id.in_(chunk),
            jobs.c.unique_key.is_not(None),
            jobs.c.unique_until.is_(None),
            jobs.c.unique_held.is_(None),
        )
        for row in connection.execute(query):
            if row.id not in above or row.unique_while == UniqueWhile.LIVE:
                found[row.id] = row.unique_key
    return found


def taken(
    connection: Connection, backend: Backend, keys: Mapping[int, str]
) -> dict[int, UniqueConflictError]:
    """Return which jobs cannot take back their keys, and why; the keys have to be locked.

    Of several that would take back the same one, the first can.
    """
    holders = holders_of(connection, backend, sorted(set(keys.values())))
    release(connection, backend, [holder.id for holder in holders.values() if holder.past])
    first = {key: holder.id for key, holder in holders.items() if not holder.past}
    conflicts: dict[int, UniqueConflictError] = {}
    for job_id, key in sorted(keys.items()):
        if first.setdefault(key, job_id) != job_id:
            refused = f"Job {job_id} cannot be run again"
            conflicts[job_id] = UniqueConflictError(key, first[key], refused)
    return conflicts


def _replaces(draft: Draft) -> bool:
    return draft.spec.chosen.on_conflict == OnConflict.REPLACE


def _decide_key(plan: Plan, key: str, drafts: Sequence[Draft], holder: Holder | None) -> None:
    """Decide about the drafts that ask for one key, in their order."""
    if holder is not None and not holder.past:
        for draft in drafts:
            if draft.spec.chosen.on_conflict == OnConflict.RAISE:
                raise UniqueConflictError(key, holder.id)
            plan.stands_for[draft] = holder.id
            if _replaces(draft) and holder.replaceable:
                plan.replaced[holder.id] = draft
        return
    if holder is not None:
        plan.past.append(holder.id)
    last = drafts[0]
    for draft in drafts[1:]:
        if draft.spec.chosen.on_conflict == OnConflict.RAISE:
            raise UniqueConflictError(key, None)
        if _replaces(draft):
            last = _in_place_of(last, draft)
    plan.stands_for |= {draft: last for draft in drafts if draft is not last}


def _in_place_of(first: Draft, second: Draft) -> Draft:
    """Return the first draft with the arguments and options of the second."""
    chosen = replace(
        second.spec.chosen,
        parent=first.parent,
        depends_on=first.spec.chosen.depends_on,
        on_conflict=OnConflict.RETURN,
    )
    return replace(first, spec=replace(second.spec, chosen=chosen))

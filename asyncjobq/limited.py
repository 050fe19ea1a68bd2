"""The claim of jobs that have limits: their permits are taken in the claim's own transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, bindparam, update

from asyncjobq import ready
from asyncjobq.backends.base import Backend, Lane, Take
from asyncjobq.lease import Claimed, Defaults, claim_columns, claim_values, claimed_from
from asyncjobq.limit_rules import LimitRules, Place, Use
from asyncjobq.limits import Capacity
from asyncjobq.permits import Permits, open_permits, save_permits

REKEYED: Final = 500
"""Jobs of a lane that are given their key at once."""


@dataclass
class LimitedClaim:
    """What a claim under limits has started, and what kept it from starting more."""

    claimed: list[Claimed] = field(default_factory=list)
    waits: dict[Place, float | None] = field(default_factory=dict)
    """Limits without room, with the seconds until they may have some; None: when a job ends."""
    rekeyed: bool = False
    """Whether jobs have moved to the lane of their key, to be found there by the next scan."""
    missing: Collection[Place] = ()
    """Limits that have no row yet: to be made before their jobs can be claimed."""


def claim_limited_once(
    connection: Connection,
    backend: Backend,
    owner: str,
    takes: Sequence[Take],
    ttl: float,
    defaults: Defaults,
    rules: LimitRules,
) -> LimitedClaim:
    """Lease jobs as far as their limits allow; each take has one lane."""
    result = LimitedClaim()
    by_take: dict[Take, list[Use]] = {}
    for take in takes:
        lane = take.lanes[0]
        if rules.has_keys_of(lane):
            by_take[take] = kept_uses(rules.uses(lane))
        else:
            result.rekeyed |= _rekey(connection, backend, lane, rules)
    permits = open_permits(connection, backend, {use for uses in by_take.values() for use in uses})
    result.missing = permits.missing
    chosen: list[int] = []
    for take, uses in by_take.items():
        if permits.room(uses) > 0:
            picked = _pick(connection, backend, take, uses, permits, rules)
            chosen += picked.ids
            result.rekeyed |= picked.rekeyed
            result.waits |= picked.waits
        result.waits |= permits.waits(uses)
    if chosen:
        values, columns = claim_values(backend, owner, ttl, defaults), claim_columns(backend)
        rows = backend.claim_rows(connection, chosen, values, columns)
        result.claimed = [claimed_from(row, owner) for row in rows]
        last = max(job.started_at for job in result.claimed)
        save_permits(connection, backend, permits, last)
    return result


def kept_uses(uses: Sequence[Use]) -> list[Use]:
    """Return the limits that are kept in the database."""
    return [use for use in uses if not isinstance(use.limit, Capacity)]


@dataclass
class _Picked:
    ids: list[int] = field(default_factory=list)
    rekeyed: bool = False
    waits: dict[Place, float | None] = field(default_factory=dict)


def _pick(
    connection: Connection,
    backend: Backend,
    take: Take,
    uses: Sequence[Use],
    permits: Permits,
    rules: LimitRules,
) -> _Picked:
    """Lock the first jobs of a lane and admit them in order, until one does not fit."""
    jobs = backend.tables.jobs
    picked = _Picked()
    most = int(min(take.count, permits.room(uses)))
    conditions = backend.built(ready.conditions)
    (candidates,) = backend.candidates(connection, [Take(take.lanes, most)], conditions)
    columns: list[Any] = [jobs.c.id, jobs.c.lease_token, jobs.c.cost]
    keyed = any(use.limit.argument for use in uses)
    if keyed:
        columns.append(backend.text_of(jobs.c.args).label("args"))
    locked = {
        row.id: row
        for row in backend.lock_rows(connection, candidates, columns, *conditions, ending=True)
    }
    wrong: dict[int, str] = {}
    usual = rules.cost_of(take.lanes[0].type)
    for row in (locked[job_id] for job_id in candidates if job_id in locked):
        cost = usual if row.cost is None else row.cost
        if len(picked.ids) >= most:
            break
        key = _key(row, take.lanes[0], rules) if keyed else take.lanes[0].limit_key
        if key != take.lanes[0].limit_key:
            wrong[row.id] = key
        elif permits.admit(uses, cost, row.id, row.lease_token + 1):
            picked.ids.append(row.id)
        else:  # the first in line waits, and nothing passes it
            picked.waits = permits.waits_for(uses, cost)
            break
    picked.rekeyed = _write_keys(connection, backend, wrong)
    return picked


def _rekey(connection: Connection, backend: Backend, lane: Lane, rules: LimitRules) -> bool:
    """Give the first jobs of a lane their keys: whoever enqueued them did not know the limits."""
    jobs = backend.tables.jobs
    conditions = backend.built(ready.conditions)
    (ids,) = backend.candidates(connection, [Take((lane,), REKEYED)], conditions)
    columns: list[Any] = [jobs.c.id, backend.text_of(jobs.c.args).label("args")]
    rows = backend.lock_rows(connection, ids[:REKEYED], columns, *conditions)
    return _write_keys(connection, backend, {row.id: _key(row, lane, rules) for row in rows})


def _write_keys(connection: Connection, backend: Backend, keys: Mapping[int, str]) -> bool:
    if not keys:
        return False
    jobs = backend.tables.jobs
    statement = update(jobs).where(jobs.c.id == bindparam("row_id"))
    values = [{"row_id": job_id, "new_key": keys[job_id]} for job_id in sorted(keys)]
    connection.execute(statement.values(limit_key=bindparam("new_key")), values)
    return True


def _key(row: Any, lane: Lane, rules: LimitRules) -> str:
    return rules.stored_key_of(lane.queue, lane.type, row.args)

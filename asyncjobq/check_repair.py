"""Mending what a check has found, by what the library does anyway.

Most rows are only left unsettled, so that settling looks at them and does what it would have done;
leases that are over are taken back by the reclaim. The rest is written under the row's lock, where
the row still breaks the rule. Nothing is done to a job that a worker holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Table,
    and_,
    case,
    delete,
    null,
    or_,
    select,
    update,
)

from asyncjobq import unique
from asyncjobq.backends.base import Backend, chunked
from asyncjobq.check import CheckReport
from asyncjobq.check_rules import Rule
from asyncjobq.control import cancel_locked, columns_of
from asyncjobq.models import in_state
from asyncjobq.states import NOT_STARTED, TERMINAL, State
from asyncjobq.transition import End, Locked, end_jobs

CHUNK: Final = 200
"""Rows that are mended in one transaction."""


@dataclass(frozen=True)
class Mended:
    """What was done about one rule."""

    rule: str
    count: int
    """How many of the rows that were found break the rule no more."""
    mending: str
    """What was done to them."""


@dataclass(frozen=True)
class RepairReport:
    """What a check found, what was mended of it, and what a second check found then."""

    found: CheckReport
    mended: tuple[Mended, ...]
    left: CheckReport


@dataclass(frozen=True)
class Broken:
    """Rows that break a rule, to be mended in one transaction."""

    connection: Connection
    backend: Backend
    rule: Rule
    grace: float
    keys: Sequence[Any]

    @property
    def jobs(self) -> Table:
        """The table of jobs."""
        return self.backend.tables.jobs

    @property
    def still(self) -> ColumnElement[bool]:
        """The condition that a row still breaks the rule."""
        return or_(*self.rule.broken(self.backend, self.grace))

    def locked(self, *names: str, ending: bool = False) -> list[Row[Any]]:
        """Lock the jobs that still break the rule; those locked elsewhere are left out."""
        columns = [self.jobs.c[name] for name in ("id", *names)]
        return self.backend.lock_rows(
            self.connection, self.keys, columns, self.still, ending=ending
        )

    def write(self, ids: Sequence[int], **values: Any) -> None:
        """Write to locked jobs."""
        for chunk in chunked(sorted(ids), 500):
            statement = update(self.jobs).where(self.jobs.c.id.in_(chunk))
            self.connection.execute(statement.values({"updated_at": self.backend.now(), **values}))


def mend_once(broken: Broken) -> None:
    """Mend rows; what has to be settled or taken back is only made ready for that."""
    mender = _MENDERS.get(broken.rule.name)
    if mender is not None and broken.keys:
        mender(broken)


def _writing(**values: Any) -> Callable[[Broken], None]:
    """Return what writes values to the rows, as long as no worker holds them."""

    def mend(broken: Broken) -> None:
        rows = broken.locked("in_flight")
        broken.write([row.id for row in rows if not row.in_flight], **values)

    return mend


def _end_lease(broken: Broken) -> None:
    """Such a lease cannot be renewed: every renewal names an owner and a token of a claim."""
    broken.write([row.id for row in broken.locked()], lease_expires=broken.backend.now(-1.0))


def _end_with_parent(broken: Broken) -> None:
    rows = broken.locked("state", "parent_id", "lease_owner", "lease_token")
    ends = [
        End(
            Locked.of(row),
            State.CANCELLED,
            error=f"cancelled with its parent, job {row.parent_id}, which had ended before it",
            cause=row.parent_id,
        )
        for row in rows
        if row.state in NOT_STARTED
    ]
    end_jobs(broken.connection, broken.backend, ends)
    waiting = [row.id for row in rows if row.state == State.WAITING]
    broken.write(waiting, cancel_requested=True, settled=False)


def _settle_parents(broken: Broken) -> None:
    backend, jobs = broken.backend, broken.jobs
    parents = {row.parent_id for row in broken.locked("parent_id")}
    is_open = jobs.c.state.not_in(sorted(TERMINAL))
    rows = backend.lock_rows(broken.connection, sorted(parents), [jobs.c.id], is_open)
    broken.write([row.id for row in rows], settled=False)


def _cancel(broken: Broken) -> None:
    columns = columns_of(broken.backend)
    rows = broken.backend.lock_rows(broken.connection, broken.keys, columns, broken.still)
    cancel_locked(broken.connection, broken.backend, rows)


def _set_end_time(broken: Broken) -> None:
    jobs = broken.jobs
    over = jobs.c.state.in_(sorted(TERMINAL))
    broken.write(
        [row.id for row in broken.locked()],
        finished_at=case((over, jobs.c.updated_at), else_=null()),
        updated_at=jobs.c.updated_at,
    )


def _give_up_key(broken: Broken) -> None:
    ids = [row.id for row in broken.locked(ending=True)]
    broken.write(ids, unique_held=None)
    broken.backend.forget_keys(broken.connection, ids)


def _take_key_back(broken: Broken) -> None:
    connection, backend = broken.connection, broken.backend
    keys = unique.keys_to_take_back(connection, backend, broken.keys)
    backend.lock_keys(connection, sorted(set(keys.values())))
    rows = {row.id for row in broken.locked()}
    keys = {job_id: key for job_id, key in keys.items() if job_id in rows}
    conflicts = unique.taken(connection, backend, keys)
    free = {job_id: key for job_id, key in keys.items() if job_id not in conflicts}
    broken.write(list(free), unique_held=broken.jobs.c.unique_key)
    backend.note_keys(connection, free)


def _note_key(broken: Broken) -> None:
    connection, backend = broken.connection, broken.backend
    notes = backend.tables.keys
    held = {row.id: row.unique_held for row in broken.locked("unique_held")}
    backend.lock_keys(connection, sorted(set(held.values())))
    query = select(notes.c.held).where(notes.c.held.in_(sorted(set(held.values()))))
    noted = set(connection.scalars(query))
    broken.write([job_id for job_id, key in held.items() if key in noted], unique_held=None)
    first: dict[str, int] = {}
    for job_id, key in sorted(held.items()):
        if key not in noted:
            first.setdefault(key, job_id)
    backend.note_keys(connection, {job_id: key for key, job_id in first.items()})


def _delete_rows(broken: Broken) -> None:
    """Delete by primary key, in statements of their own: what reads another table may lock it."""
    table = broken.rule.table(broken.backend.tables)
    key, own = broken.rule.key(broken.backend.tables), list(table.primary_key.columns)
    found = broken.connection.execute(select(*own).where(key.in_(broken.keys), broken.still))
    for row in found.all():
        same = (column == value for column, value in zip(own, row, strict=True))
        broken.connection.execute(delete(table).where(and_(*same)))


def _stop_firing(broken: Broken) -> None:
    table = broken.backend.tables.schedules
    here = table.c.name.in_(broken.keys)
    broken.connection.execute(update(table).where(here, table.c.paused).values(next_fire=None))


def _unsettle_blocked(broken: Broken) -> None:
    blocked = in_state(broken.jobs, State.BLOCKED)
    columns = [broken.jobs.c.id]
    rows = broken.backend.lock_rows(broken.connection, broken.keys, columns, blocked)
    broken.write([row.id for row in rows], settled=False)


_unsettle: Final = _writing(settled=False)
_block: Final = _writing(state=State.BLOCKED, settled=False)

_MENDERS: Final[Mapping[str, Callable[[Broken], None]]] = {
    "lease without end": _end_lease,
    "overdue": _writing(state=State.READY),
    "ready too early": _writing(state=State.SCHEDULED),
    "ready in spite of upstreams": _block,
    "container in line": _block,
    "lease left over": _writing(lease_owner=None, lease_expires=None),
    "upstream's end missed": _unsettle,
    "circle": _unsettle_blocked,
    "blocked by nothing": _unsettle,
    "waiting for nobody": _unsettle,
    "parent ended before child": _end_with_parent,
    "parent missing": _writing(parent_id=None, child_key=None, settled=False),
    "cancellation not passed on": _settle_parents,
    "cancellation ignored": _cancel,
    "time of the end": _set_end_time,
    "key held wrongly": _give_up_key,
    "key lost": _take_key_back,
    "key not noted": _note_key,
    "key noted for nobody": _delete_rows,
    "permit without limit": _delete_rows,
    "paused schedule that fires": _stop_firing,
    "edge of no job": _delete_rows,
    "attempt of no job": _delete_rows,
}

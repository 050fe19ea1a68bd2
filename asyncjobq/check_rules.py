"""The rules that the tables must obey, each as the condition of a row that breaks it.

Every condition is part of one statement, so that it judges one moment, and takes nothing for a
fault that is under way: settling is asynchronous, so a rule about neighbours is broken only where
the rows that settling would still look at are settled; and what waits for the next tick of a worker
(an expired lease, a due job, an unsettled row) is late only after a grace.

What the tables' own constraints refuse is not looked at: unknown states and kinds, a weight of 0,
`in_flight` without the state. Nor is what may be so for good reasons: a satisfied edge to an
upstream that was opened again, a permit whose lease is over (the next claim under its limit drops
it), a `cause` that was pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, FromClause, Table, and_, exists, literal, or_, select

from asyncjobq.backends.base import Backend
from asyncjobq.models import Tables, in_state
from asyncjobq.states import NOT_STARTED, TERMINAL, Kind, State
from asyncjobq.transition import open_children

Conditions = Callable[[Backend, float], Sequence[ColumnElement[bool]]]


@dataclass(frozen=True)
class Rule:
    """One rule: its name, how a row breaks it, and what is done about that."""

    name: str
    problem: str
    mending: str | None
    """None: nothing can be done without knowing more."""
    broken: Conditions
    """Given the grace in seconds, conditions each of which alone breaks the rule."""
    key: Callable[[Tables], ColumnElement[Any]] = lambda tables: tables.jobs.c.id
    """What names the row to people."""
    sliced: bool = True
    """Whether no index leads to the rows, so that the whole table is read, slice by slice."""

    def table(self, tables: Tables) -> Table:
        """Return the table that is read."""
        found: Any = self.key(tables)
        table: Table = found.table
        return table


# -- leases, and the line of what is ready ------------------------------------------------------


def _dead_lease(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    no_owner = or_(jobs.c.lease_owner.is_(None), jobs.c.lease_token <= 0)
    return [and_(jobs.c.in_flight, or_(jobs.c.lease_expires.is_(None), no_owner))]


def _expired_lease(backend: Backend, grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    return [and_(jobs.c.in_flight, jobs.c.lease_expires < backend.now(-grace))]


def _lease_left(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    left = or_(jobs.c.lease_owner.is_not(None), jobs.c.lease_expires.is_not(None))
    return [and_(~jobs.c.in_flight, left)]


def _overdue(backend: Backend, grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    late = or_(jobs.c.run_after.is_(None), jobs.c.run_after < backend.now(-grace))
    return [and_(in_state(jobs, State.SCHEDULED), late)]


def _early(backend: Backend, grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    return [and_(in_state(jobs, State.READY), jobs.c.run_after > backend.now(grace))]


def _in_line(jobs: FromClause, condition: ColumnElement[bool]) -> Sequence[ColumnElement[bool]]:
    """Return the condition for what runs or may soon, one index a part."""
    states = [in_state(jobs, State.READY), in_state(jobs, State.SCHEDULED), jobs.c.in_flight]
    return [and_(state, condition) for state in states]


def _held_in_line(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    return _in_line(backend.tables.jobs, waits_for_upstreams(backend))


def _container_in_line(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    return _in_line(jobs, jobs.c.kind == Kind.CONTAINER)


def _attempt_wrong(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    return [or_(jobs.c.attempt < 0, jobs.c.attempt > jobs.c.lease_token)]


# -- what settling keeps in agreement -----------------------------------------------------------


def _unsettled(backend: Backend, grace: float) -> Sequence[ColumnElement[bool]]:
    """A row that is open again rightly waits for the end of what it is to revive."""
    jobs, revived = backend.tables.jobs, backend.tables.jobs_as("revived")
    coming = exists().where(
        revived.c.cause == jobs.c.id, in_state(revived, State.WAITING), revived.c.cancel_requested
    )
    is_held = and_(jobs.c.state.not_in(sorted(TERMINAL)), coming.correlate(jobs))
    return [and_(~jobs.c.settled, jobs.c.updated_at < backend.now(-grace), ~is_held)]


def _edge_forgotten(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, deps = backend.tables.jobs, backend.tables.deps
    upstream = backend.tables.jobs_as("upstream")
    over = or_(upstream.c.id.is_(None), and_(ended(upstream), upstream.c.settled))
    edges = deps.outerjoin(upstream, upstream.c.id == deps.c.depends_on_id)
    found = select(literal(1)).select_from(edges)
    found = found.where(deps.c.job_id == jobs.c.id, ~deps.c.satisfied, over).correlate(jobs)
    return [and_(in_state(jobs, State.BLOCKED), jobs.c.settled, found.exists())]


def _blocked_for_nothing(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, parent = backend.tables.jobs, backend.tables.jobs_as("parent")
    opened = or_(in_state(parent, State.WAITING), parent.c.kind == Kind.JOB)
    lets_go = exists().where(
        parent.c.id == jobs.c.parent_id,
        parent.c.settled,
        ~parent.c.cancel_requested,
        ~ended(parent),
        opened,
    )
    free = or_(jobs.c.parent_id.is_(None), lets_go.correlate(jobs))
    blocked = and_(in_state(jobs, State.BLOCKED), jobs.c.settled)
    return [and_(blocked, ~waits_for_upstreams(backend), free)]


def _waiting_for_nobody(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, child = backend.tables.jobs, backend.tables.jobs_as("unsettled_child")
    coming = exists().where(child.c.parent_id == jobs.c.id, ~child.c.settled).correlate(jobs)
    alone = and_(~open_children(backend.tables, jobs), ~coming)
    return [and_(in_state(jobs, State.WAITING), jobs.c.settled, alone)]


def _parent_ended(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, parent = backend.tables.jobs, backend.tables.jobs_as("parent")
    over = exists().where(parent.c.id == jobs.c.parent_id, parent.c.settled, ended(parent))
    return [and_(~ended(jobs), jobs.c.settled, over.correlate(jobs))]


def _parent_missing(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, parent = backend.tables.jobs, backend.tables.jobs_as("parent")
    there = exists().where(parent.c.id == jobs.c.parent_id).correlate(jobs)
    return [and_(jobs.c.parent_id.is_not(None), ~there)]


def _cancel_untold(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, parent = backend.tables.jobs, backend.tables.jobs_as("parent")
    cancelling = exists().where(
        parent.c.id == jobs.c.parent_id,
        parent.c.cancel_requested,
        parent.c.settled,
        ~ended(parent),
    )
    untold = and_(~ended(jobs), ~jobs.c.cancel_requested, jobs.c.settled)
    return [and_(untold, cancelling.correlate(jobs))]


def _cancel_ignored(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    return [and_(jobs.c.state.in_(sorted(NOT_STARTED)), jobs.c.cancel_requested)]


def _end_time(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    no_time = and_(ended(jobs), jobs.c.finished_at.is_(None))
    return [or_(no_time, and_(~ended(jobs), jobs.c.finished_at.is_not(None)))]


def waits_for_upstreams(backend: Backend) -> ColumnElement[bool]:
    """Return the condition that a job has an edge which is not satisfied."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    return exists().where(deps.c.job_id == jobs.c.id, ~deps.c.satisfied).correlate(jobs)


def ended(jobs: FromClause) -> ColumnElement[bool]:
    """Return the condition that a job has ended."""
    return jobs.c.state.in_(sorted(TERMINAL))


JOB_RULES: Final = (
    Rule(
        "lease without end",
        "is leased, but by nobody or for ever",
        "The lease is ended, so that the job is taken back like any whose lease ran out.",
        _dead_lease,
        sliced=False,
    ),
    Rule(
        "lease run out",
        "has a lease that ran out, and nobody has taken it back",
        "It is taken back: run again, or ended if that was asked or its attempts are used up.",
        _expired_lease,
        sliced=False,
    ),
    Rule(
        "unsettled",
        "has changed, and what is around it has not been told",
        "It is settled, as often as that takes; what others have locked stays as it is.",
        _unsettled,
        sliced=False,
    ),
    Rule(
        "overdue",
        "is scheduled for a time that is past, or for none",
        "It becomes ready.",
        _overdue,
        sliced=False,
    ),
    Rule(
        "ready too early",
        "is ready, though its time is still to come",
        "It becomes scheduled.",
        _early,
        sliced=False,
    ),
    Rule(
        "ready in spite of upstreams",
        "stands in line or runs, though it waits for another job",
        "It becomes blocked and is settled, which lets it go or ends it if nothing is waited for.",
        _held_in_line,
        sliced=False,
    ),
    Rule(
        "container in line",
        "is a container, but stands in line like a job",
        "It becomes blocked and is settled, which opens it.",
        _container_in_line,
        sliced=False,
    ),
    Rule(
        "lease left over",
        "is not leased, but names an owner or an end of a lease",
        "What is left of the lease is taken out.",
        _lease_left,
    ),
    Rule(
        "attempts miscounted",
        "counts less than no attempt, or more than it was ever leased",
        None,
        _attempt_wrong,
    ),
    Rule(
        "upstream's end missed",
        "is blocked by a job that has ended, or does not exist any more",
        "It is settled: let go, or cancelled if the other job failed.",
        _edge_forgotten,
    ),
    Rule(
        "blocked by nothing",
        "is blocked, but every job that it depends on is done and what it is in has opened",
        "It is settled, which lets it go.",
        _blocked_for_nothing,
    ),
    Rule(
        "waiting for nobody",
        "waits for its children, but none is open",
        "It is settled, which ends it.",
        _waiting_for_nobody,
    ),
    Rule(
        "parent ended before child",
        "has not ended, but the job or container that it is in has",
        "It is cancelled with its parent; one that runs is left to its worker.",
        _parent_ended,
    ),
    Rule(
        "parent missing",
        "is in a job or container that does not exist",
        "It becomes a job of its own.",
        _parent_missing,
    ),
    Rule(
        "cancellation not passed on",
        "is in a job or container that is being cancelled, and was not told",
        "Its parent is settled, which cancels it.",
        _cancel_untold,
    ),
    Rule(
        "cancellation ignored",
        "was to be cancelled before it started, but is still in line",
        "It is cancelled.",
        _cancel_ignored,
    ),
    Rule(
        "time of the end",
        "has ended without a time, or has a time of its end and has not ended",
        "The time of its last change is taken, or the time taken out.",
        _end_time,
    ),
)

"""How many jobs of each queue and type are in which state, at a cost that has a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from asyncjobq.backends.base import Backend
from asyncjobq.limit_rules import LimitRules
from asyncjobq.limit_states import LimitState, limit_states
from asyncjobq.models import in_state
from asyncjobq.states import State
from asyncjobq.unserved import ready_kinds

_Counts = Counter[tuple[str, str, State]]


@dataclass(frozen=True)
class KindStats:
    """The jobs and containers of one queue and type."""

    queue: str
    type: str
    jobs: Mapping[State, int]
    """By state, those in which there are any."""


@dataclass(frozen=True)
class Stats:
    """What is in the tables, by queue and type, and how the limits are used."""

    kinds: tuple[KindStats, ...]
    limits: tuple[LimitState, ...]
    whole: bool
    """Whether all jobs were counted, because there are not more than was asked for.

    If not, states with an index of their own (ready, scheduled, leased and running) are counted up
    to that number for each queue and type, or in all; the others among the newest jobs alone.
    """

    @property
    def jobs(self) -> Counter[State]:
        """The jobs by state, of all queues and types together."""
        return sum((Counter(kind.jobs) for kind in self.kinds), Counter[State]())


def read_stats(connection: Connection, backend: Backend, rules: LimitRules, most: int) -> Stats:
    """Count jobs, looking at about `most` of each kind."""
    counts = _newest(connection, backend, most)
    whole = counts.total() < most
    if not whole:
        _count_indexed(connection, backend, counts, most)
    by_kind: dict[tuple[str, str], dict[State, int]] = {}
    for (queue, type_, state), count in sorted(counts.items()):
        if count:
            by_kind.setdefault((queue, type_), {})[state] = count
    kinds = tuple(KindStats(queue, type_, jobs) for (queue, type_), jobs in by_kind.items())
    return Stats(kinds, tuple(limit_states(connection, backend, rules, most)), whole)


def _newest(connection: Connection, backend: Backend, most: int) -> _Counts:
    jobs = backend.tables.jobs
    query = select(jobs.c.queue, jobs.c.type, jobs.c.state).order_by(jobs.c.id.desc())
    return _grouped(connection, query.limit(most))


def _count_indexed(connection: Connection, backend: Backend, counts: _Counts, most: int) -> None:
    """Count what is ready, scheduled or in flight, whatever its age."""
    jobs = backend.tables.jobs
    query = select(jobs.c.queue, jobs.c.type, jobs.c.state)
    indexed = {State.READY, State.SCHEDULED, State.LEASED, State.RUNNING}
    for key in [key for key in counts if key[2] in indexed]:
        del counts[key]
    for queue, type_ in ready_kinds(connection, backend):
        ready = query.where(
            in_state(jobs, State.READY), jobs.c.queue == queue, jobs.c.type == type_
        )
        counts.update(_grouped(connection, ready.limit(most)))
    scheduled = query.where(in_state(jobs, State.SCHEDULED))
    counts.update(_grouped(connection, scheduled.limit(most)))
    counts.update(_grouped(connection, query.where(jobs.c.in_flight).limit(most)))


def _grouped(connection: Connection, query: Any) -> _Counts:
    some = query.subquery("some")
    columns = (some.c.queue, some.c.type, some.c.state)
    rows = connection.execute(select(*columns, func.count()).group_by(*columns))
    return Counter({(queue, type_, State(state)): count for queue, type_, state, count in rows})

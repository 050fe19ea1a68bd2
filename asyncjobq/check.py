"""Whether the tables obey their rules: read-only, rule by rule, in short statements.

What stands in line, is leased or unsettled is found by indexes, so that these rules cost what is
open. The others read whole tables, in slices of a bounded number of rows: a second or two for every
100,000 rows. Each statement is a transaction of its own, so that no snapshot is held for long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, select

from asyncjobq.backends.base import Backend, Database
from asyncjobq.check_rules import Rule
from asyncjobq.check_small import rules_for
from asyncjobq.clock import monotonic
from asyncjobq.cycles import waiting_for_themselves
from asyncjobq.limit_rules import LimitRules
from asyncjobq.limits import Concurrency
from asyncjobq.models import in_state
from asyncjobq.permits import as_set, live_permits
from asyncjobq.presence import list_workers, unserved
from asyncjobq.states import State
from asyncjobq.unserved import ready_kinds

SLICE: Final = 10_000
"""Rows of a table that one statement reads."""
MOST: Final = 10_000
"""Rows that one statement finds; where an index leads to them, no more are counted."""

OVER_LIMIT: Final = Rule(
    "limit exceeded",
    "runs more jobs than it allows (as it may after it was lowered, until enough have ended)",
    None,
    lambda backend, grace: (),
)
CIRCLE: Final = Rule(
    "circle",
    "waits for itself, through what it depends on and what it is in",
    "It is settled, which cancels it.",
    lambda backend, grace: (),
)
UNSERVED: Final = Rule(
    "type that no live worker serves",
    "is a type and a queue of ready jobs, and none of the workers that are there starts them",
    None,
    lambda backend, grace: (),
)


@dataclass(frozen=True)
class Finding:
    """One rule that rows break."""

    rule: str
    problem: str
    """What is wrong with each of them, as the rest of a sentence that begins with its id."""
    count: int
    """How many do so; where an index leads to them, 10,000 stands for at least so many."""
    examples: tuple[int | str, ...]
    """The first of them: ids of jobs, keys, names of limits, schedules or types."""
    mending: str | None
    """What `repair` does about it; None: nothing, for that takes somebody who knows more."""


@dataclass(frozen=True)
class CheckReport:
    """What a check has found."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    """The rules that were checked to the end."""
    unfinished: tuple[str, ...]
    """Those for which the time was too short."""

    @property
    def clean(self) -> bool:
        """Whether all was checked, and nothing found."""
        return not self.findings and not self.unfinished


@dataclass
class Checking:
    """One check, step by step, each a short transaction."""

    backend: Backend
    limit_rules: LimitRules
    grace: float
    """Seconds for which what a worker's next tick puts right is not a fault."""
    found: defaultdict[str, list[int | str]] = field(default_factory=lambda: defaultdict(list))
    """What breaks each rule, by the rule's name."""
    unfinished: list[str] = field(default_factory=list)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules of this database."""
        return (*rules_for(self.backend), CIRCLE, OVER_LIMIT, UNSERVED)

    async def run(self, database: Database, within: float) -> None:
        """Go through all rules, or as far as one gets in so many seconds."""
        deadline = monotonic() + within
        parts = list(self._parts())
        while parts and monotonic() < deadline:
            looked = await database.read(parts[0].look)  # which may be called again on the way
            for name, keys in looked.keys.items():
                self.found[name] += keys
            parts[0].after = looked.upto
            if looked.upto is None:
                parts.pop(0)
        self.unfinished = [rule.name for part in parts for rule in part.rules]

    def report(self, examples: int) -> CheckReport:
        """Return what was found, with up to so many examples of each."""
        findings = tuple(
            Finding(rule.name, rule.problem, len(keys), tuple(keys[:examples]), rule.mending)
            for rule in self.rules
            if (keys := self.found.get(rule.name))
        )
        names = tuple(rule.name for rule in self.rules if rule.name not in self.unfinished)
        return CheckReport(findings, names, tuple(self.unfinished))

    def _parts(self) -> Iterator[_Part]:
        by_table: defaultdict[str, list[Rule]] = defaultdict(list)
        for rule in rules_for(self.backend):
            if rule.sliced:
                by_table[rule.table(self.backend.tables).name].append(rule)
            else:
                yield _Part(self, [rule])
        yield _Limits(self, [OVER_LIMIT])
        yield _Types(self, [UNSERVED])
        for rules in by_table.values():
            yield _Sliced(self, rules)
        yield _Circles(self, [CIRCLE])


@dataclass(frozen=True)
class _Looked:
    """What one statement, or those of one slice, have found."""

    keys: dict[str, list[int | str]]
    """By the rules' names."""
    upto: Any = None
    """Where to go on; None: that was all."""


@dataclass
class _Part:
    """Rules that are checked together; this one by indexes, at once."""

    checking: Checking
    rules: list[Rule]
    after: Any = None

    def look(self, connection: Connection) -> _Looked:
        """Check, as far as one short transaction goes."""
        return _Looked({rule.name: self._broken(connection, rule) for rule in self.rules})

    def _broken(
        self, connection: Connection, rule: Rule, *within: ColumnElement[bool]
    ) -> list[int | str]:
        backend = self.checking.backend
        key = rule.key(backend.tables)
        keys: set[int | str] = set()
        for broken in rule.broken(backend, self.checking.grace):
            query = select(key).where(broken, *within).order_by(key).limit(MOST)
            keys.update(connection.scalars(query))
        return sorted(keys)


@dataclass
class _Sliced(_Part):
    """Rules of one table without an index for them."""

    def look(self, connection: Connection) -> _Looked:
        within, upto = self._slice(connection)
        keys = {rule.name: self._broken(connection, rule, *within) for rule in self.rules}
        return _Looked(keys, upto)

    def _slice(self, connection: Connection) -> tuple[list[ColumnElement[bool]], Any]:
        """Return the condition for the next slice, and its last key; None if it is the last."""
        key = self.rules[0].key(self.checking.backend.tables)
        behind = [] if self.after is None else [key > self.after]
        upto = connection.scalar(_last_of_slice(key, behind))
        return (behind if upto is None else [*behind, key <= upto]), upto


def _last_of_slice(key: ColumnElement[Any], behind: list[ColumnElement[bool]]) -> Select[Any]:
    return select(key).where(*behind).order_by(key).offset(SLICE - 1).limit(1)


@dataclass
class _Circles(_Sliced):
    """Jobs that wait for themselves, one of each circle."""

    def look(self, connection: Connection) -> _Looked:
        backend = self.checking.backend
        jobs = backend.tables.jobs
        within, upto = self._slice(connection)
        blocked = in_state(jobs, State.BLOCKED), jobs.c.settled, jobs.c.parent_id.is_not(None)
        ids = list(connection.scalars(select(jobs.c.id).where(*blocked, *within)))
        # What is read in several statements may not be of one moment; a circle stays.
        for _ in range(2):
            ids = [end.row.id for end in waiting_for_themselves(connection, backend, ids)]
        return _Looked({CIRCLE.name: list[int | str](ids)}, upto)


@dataclass
class _Limits(_Part):
    """How many jobs run under limits of concurrency; those of this scheduler and its handlers."""

    def look(self, connection: Connection) -> _Looked:
        backend, known = self.checking.backend, self.checking.limit_rules.by_name
        limits = backend.tables.limits
        live = live_permits(connection, backend)
        rows = {(row.name, row.value): row for row in connection.execute(select(limits))}
        over: list[int | str] = []
        for (name, value), row in sorted(rows.items()):
            limit = known.get(name)
            if not isinstance(limit, Concurrency):
                continue
            most = max(limit.most, as_set(limit, rows.get((name, ""))).most)
            if live[row.id] > most:
                over.append(f"{name}={value}" if value else name)
        return _Looked({OVER_LIMIT.name: over})


@dataclass
class _Types(_Part):
    """Queues and types that wait for a worker, where there are workers at all."""

    def look(self, connection: Connection) -> _Looked:
        backend = self.checking.backend
        workers = list_workers(connection, backend)
        others = unserved(workers, ready_kinds(connection, backend)) if workers else []
        old = (kind for kind in others if self._is_old(connection, *kind))
        return _Looked({UNSERVED.name: [f"{type_} in {queue}" for queue, type_ in old]})

    def _is_old(self, connection: Connection, queue: str, type_: str) -> bool:
        """Tell whether of the first jobs one has been ready for longer than the grace."""
        backend = self.checking.backend
        jobs = backend.tables.jobs
        lane = in_state(jobs, State.READY), jobs.c.queue == queue, jobs.c.type == type_
        first = backend.by_lane(select(jobs.c.updated_at).where(*lane)).limit(MOST).subquery()
        old = first.c.updated_at < backend.now(-self.checking.grace)
        return connection.scalar(select(first.c.updated_at).where(old).limit(1)) is not None

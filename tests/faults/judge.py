"""What must be true of the tables and of the handlers' log when a run is over."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, select, text

from asyncjobq import Cancelled, JobDepRow, JobRow, State
from asyncjobq.models import AttemptRow
from asyncjobq.states import TERMINAL
from cases.log import Entry, Log
from faults.program import Application, Effect, Ended

_TERMINAL: Final = ", ".join(f"'{state}'" for state in sorted(TERMINAL))
_END: Final = (
    f"NEW.state <> OLD.state AND (NEW.state IN ({_TERMINAL}) OR OLD.state IN ({_TERMINAL}))"
)
_NOTE: Final = "INSERT INTO ended (job_id) VALUES (NEW.id)"


def note_ends(connection: Connection) -> None:
    """Make the application's tables; have the database note each end and each move from one."""
    Application.metadata.create_all(connection)
    for statement in _triggers(connection.dialect.name):
        connection.execute(text(statement))


def _triggers(product: str) -> list[str]:
    if product == "sqlite":
        when = f"AFTER UPDATE OF state ON jobs WHEN {_END}"
        return [f"CREATE TRIGGER note_end {when} BEGIN {_NOTE}; END"]
    if product == "postgresql":
        body = f"BEGIN {_NOTE}; RETURN NEW; END"
        return [
            f"CREATE FUNCTION note_end() RETURNS trigger LANGUAGE plpgsql AS $${body}$$",
            f"CREATE TRIGGER note_end AFTER UPDATE ON jobs FOR EACH ROW WHEN ({_END}) "
            "EXECUTE FUNCTION note_end()",
        ]
    action = f"BEGIN IF {_END} THEN {_NOTE}; END IF; END"
    return [f"CREATE TRIGGER note_end AFTER UPDATE ON jobs FOR EACH ROW {action}"]


@dataclass
class Tables:
    """All that the tables say at the end of a run."""

    jobs: dict[int, Any]
    edges: list[tuple[int, int]]
    effects: Counter[int]
    ends: Counter[int]
    lost_leases: int
    by_name: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_name = {row.name: row for row in self.jobs.values() if row.name is not None}


def read_tables(connection: Connection) -> Tables:
    """Read all of it."""
    names = ("id", "name", "type", "kind", "state", "attempt", "result", "error", "parent_id")
    columns = [getattr(JobRow, name) for name in names]
    edges = select(JobDepRow.job_id, JobDepRow.depends_on_id)
    lost = select(AttemptRow.id).where(AttemptRow.ending == "lease_lost")
    return Tables(
        {row.id: row for row in connection.execute(select(*columns))},
        [(row.job_id, row.depends_on_id) for row in connection.execute(edges)],
        Counter(connection.scalars(select(Effect.job_id))),
        Counter(connection.scalars(select(Ended.job_id))),
        len(connection.scalars(lost).all()),
    )


def entries_of(log: Log) -> list[Entry]:
    """Return all lines of the log."""
    return [Entry(*json.loads(line)) for line in log.path.read_text().splitlines()]


@dataclass
class Judge:
    """Compares what was expected with what has become of it."""

    tables: Tables
    expected: dict[str, frozenset[State]]
    answers: dict[str, Cancelled]
    retried: Counter[str]
    entries: list[Entry]

    def faults(self) -> Iterator[str]:
        """Yield what is wrong, in words."""
        yield from self._lost()
        yield from self._ended_other_than_once()
        yield from self._in_wrong_states()
        yield from self._with_wrong_results()
        yield from self._out_of_order()

    @property
    def run_twice(self) -> int:
        """How many jobs were started more often than their handlers had asked for."""
        starts = Counter(entry.label for entry in self.entries if entry.event == "start")
        asked = Counter(
            entry.label for entry in self.entries if entry.event == "start" and entry.attempt == 1
        )
        again = {label for label, count in starts.items() if count > 1}
        failing = ("flaky", "hopeless", "crash", "broken_flow", "retry")
        plain = {label for label in again if not label.startswith(failing)}
        several = {label for label in again - plain if asked[label] > 1 + self.retried[label]}
        return len(plain | several)

    @property
    def reopened(self) -> int:
        """How many jobs ended, were run again on request, and ended again."""
        return sum(count > 1 for count in self.tables.ends.values())

    @property
    def starts(self) -> int:
        """How often a handler was started."""
        return sum(entry.event == "start" for entry in self.entries)

    def _lost(self) -> Iterator[str]:
        for name in self.expected.keys() - self.tables.by_name.keys():
            yield f"lost: {name} was enqueued, and there is no such job"
        for row in self.tables.jobs.values():
            if row.state not in TERMINAL:
                yield f"lost: job {row.id} ({row.name or row.type}) is {row.state} for ever"

    def _ended_other_than_once(self) -> Iterator[str]:
        told = Counter(entry.label for entry in self.entries if entry.event == "told")
        for row in self.tables.jobs.values():
            # Each time that it is run again, it moves from one end, and to another.
            most = 1 + 2 * self.retried[row.name]
            if row.state in TERMINAL and not 1 <= self.tables.ends[row.id] <= most:
                yield f"finalized {self.tables.ends[row.id]} times: job {row.id} ({row.name})"
            if told[str(row.id)] > 1 + self.retried[row.name]:
                yield f"told {told[str(row.id)]} times of the end of job {row.id} ({row.name})"
            wanted = int(row.type == "complete" and row.state == State.DONE)
            if self.tables.effects[row.id] != wanted:
                yield f"{self.tables.effects[row.id]} effects of job {row.id} ({row.name})"

    def _in_wrong_states(self) -> Iterator[str]:
        for name, states in self.expected.items():
            row = self.tables.by_name.get(name)
            if row is not None and row.state in TERMINAL and row.state not in states:
                yield f"wrong state: {name} is {row.state} ({row.error}), not {sorted(states)}"
        for name, answer in self.answers.items():
            row, dependant = self.tables.by_name[name], self.tables.by_name[f"{name}-after"]
            if answer is Cancelled.CANCELLED and row.state != State.CANCELLED:
                yield f"wrong state: {name} was cancelled by the answer, and is {row.state}"
            if dependant.state != row.state:
                yield f"wrong state: {name} is {row.state}, what waits for it {dependant.state}"
        for row in self.tables.jobs.values():
            if row.name is None and row.state != State.DONE:
                yield f"wrong state: the child {row.id} is {row.state} ({row.error})"

    def _with_wrong_results(self) -> Iterator[str]:
        """The result has to be that of the attempt which had the lease: the last."""
        for row in self.tables.jobs.values():
            is_job = row.kind == "job" and row.state == State.DONE
            if is_job and row.result != row.attempt:
                yield f"wrong result: {row.result} of attempt {row.attempt} of job {row.id}"

    def _out_of_order(self) -> Iterator[str]:
        """A dependant starts after an end of what it depends on."""
        first_start: dict[str, float] = {}
        ends: defaultdict[str, list[float]] = defaultdict(list)
        for entry in self.entries:
            if entry.event == "start":
                first_start.setdefault(entry.label, entry.at)
            elif entry.event == "end":
                ends[entry.label].append(entry.at)
        for job_id, upstream_id in self.tables.edges:
            job, upstream = self.tables.jobs[job_id], self.tables.jobs[upstream_id]
            if upstream.type != "work" or upstream.state != State.DONE:
                continue
            started = first_start.get(job.name)
            if started is not None and started < min(ends[upstream.name], default=started + 1):
                yield f"out of order: {job.name} started before {upstream.name} had ended"

"""Write how attempts ended: the result, the state and the end of the lease in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import Connection, Select, select

from asyncjobq.attempts import Unsuccessful, keep_attempts
from asyncjobq.backends.base import Backend, chunked, rows_by_id
from asyncjobq.codec import Encoded
from asyncjobq.lease import Lease, completed_among, still_ours, store_progress
from asyncjobq.outcomes import Ending, Failure, Outcome
from asyncjobq.states import TERMINAL, State
from asyncjobq.transition import End, Return, end_jobs, return_jobs


@dataclass(frozen=True, slots=True)
class Finished:
    """A lease and the outcome that it is to be given back with."""

    lease: Lease
    outcome: Outcome
    progress: Encoded | None = None
    """What the handler has reported last, if that is not stored yet."""
    completing: bool = False
    """Whether the handler may have ended the job itself, in a transaction of its own."""


@dataclass
class Written:
    """What became of a batch of outcomes."""

    written: list[Finished] = field(default_factory=list)
    lost: list[Finished] = field(default_factory=list)
    held: list[Finished] = field(default_factory=list)
    """Rows that some transaction has locked: nothing was written, to be tried again."""
    states: dict[int, State] = field(default_factory=dict)
    """What became of jobs that ended; not always what their outcome asked for."""
    completed: dict[Lease, State] = field(default_factory=dict)
    """What their handlers had ended themselves, and how; the outcome counts for nothing."""
    waiting: frozenset[int] = frozenset()
    """Jobs whose own work is over, but that wait for their children."""
    unsettled: frozenset[int] = frozenset()
    """Those that have dependants or a parent, for `settle.py` to tell."""

    def add(self, other: Written) -> None:
        """Take in what became of others."""
        self.written += other.written
        self.lost += other.lost
        self.held += other.held
        self.states |= other.states
        self.completed |= other.completed
        self.waiting |= other.waiting
        self.unsettled |= other.unsettled


def finalize_once(connection: Connection, backend: Backend, batch: Sequence[Finished]) -> Written:
    """Write a batch of outcomes under their fences.

    Outcomes of leases that were lost change nothing.
    """
    # The newest attempt of a job counts, should two of one process come together.
    waiting = {item.lease.job_id: item for item in sorted(batch, key=lambda i: i.lease.token)}
    result = Written(lost=[item for item in batch if waiting[item.lease.job_id] is not item])
    locked = rows_by_id(connection, backend.built(_in_flight), sorted(waiting))
    rows = backend.free_to_end(connection, locked)
    moves: list[End | Return] = []
    unsuccessful: list[Unsuccessful] = []
    for row in rows:
        item = waiting.pop(row.id)
        if (row.lease_owner, row.lease_token) != (item.lease.owner, item.lease.token):
            result.lost.append(item)
            continue
        result.written.append(item)
        moves.append(_move(item, row.cancel_requested))
        unsuccessful += _unsuccessful(item, moves[-1])
    keep_attempts(connection, backend, unsuccessful)
    progress = {item.lease: item.progress for item in result.written if item.progress is not None}
    store_progress(connection, backend, progress)
    ends = [move for move in moves if isinstance(move, End)]
    ended = end_jobs(connection, backend, ends)
    result.states = {end.row.id: end.state for end in ends}
    result.unsettled, result.waiting = ended.unsettled, ended.waiting
    return_jobs(connection, backend, [move for move in moves if isinstance(move, Return)])
    ours = still_ours(connection, backend, [item.lease for item in waiting.values()])
    for item in waiting.values():
        (result.held if item.lease in ours else result.lost).append(item)
    _part_completed(connection, backend, result)
    _part_written(connection, backend, result)
    return result


def _in_flight(backend: Backend) -> Select[Any]:
    jobs = backend.tables.jobs
    names = ("id", "lease_owner", "lease_token", "cancel_requested", "unique_held")
    return backend.locking_by_id(select(*(jobs.c[name] for name in names)).where(jobs.c.in_flight))


def _part_completed(connection: Connection, backend: Backend, result: Written) -> None:
    """Tell jobs that their own handlers have ended from those whose lease was lost."""
    doubtful = [item.lease for item in result.lost if item.completing]
    if not doubtful:
        return
    result.completed = completed_among(connection, backend, doubtful)
    result.lost = [item for item in result.lost if item.lease not in result.completed]
    result.unsettled |= {lease.job_id for lease in result.completed}


def _part_written(connection: Connection, backend: Backend, result: Written) -> None:
    """Tell outcomes that an earlier call has written from those whose lease was lost.

    The answer to its COMMIT was lost on the way.
    """
    jobs = backend.tables.jobs
    doubtful = {item.lease.job_id: item for item in result.lost}
    for chunk in chunked(list(doubtful), 500):
        query = select(jobs.c.id, jobs.c.lease_token, jobs.c.state, jobs.c.error)
        for row in connection.execute(query.where(jobs.c.id.in_(chunk))):
            if _shows(row, doubtful[row.id]):
                result.written.append(doubtful[row.id])
                result.lost.remove(doubtful[row.id])
                result.waiting |= {row.id} if row.state == State.WAITING else frozenset()
                result.unsettled |= {row.id}


def _shows(row: Any, item: Finished) -> bool:
    """Tell whether the row has this outcome.

    No other end of the same claim has its state and its error; and the next claim has a new token.
    """
    if row.lease_token != item.lease.token or row.error != item.outcome.error:
        return False
    if item.outcome.state in TERMINAL:
        return row.state in (item.outcome.state, State.WAITING)
    return row.error is not None and row.state in (State.READY, State.SCHEDULED)


def _move(item: Finished, cancel_requested: bool) -> End | Return:
    locked, outcome = item.lease.row, item.outcome
    if outcome.state in TERMINAL:
        return End(locked, outcome.state, outcome.result, outcome.error)
    if cancel_requested:
        return End(locked, State.CANCELLED, error="cancelled on request")
    return Return(locked, outcome.retry_after or 0.0, outcome.error, outcome.costs_attempt)


_UNSUCCESSFUL: Final = frozenset({Ending.FAILED, Ending.TIMED_OUT, Ending.CANCELLED})


def _unsuccessful(item: Finished, move: End | Return) -> list[Unsuccessful]:
    """Return what is to be kept of an attempt: nothing of one that succeeded or costs nothing.

    One that was cut short or snoozed while its end was asked for was cancelled by that.
    """
    lease, outcome = item.lease, item.outcome
    ending, failure = outcome.ending, outcome.kept_failure
    if ending not in _UNSUCCESSFUL:
        if isinstance(move, Return) or move.state is not State.CANCELLED:
            return []
        ending, failure = Ending.CANCELLED, Failure(message=move.error)
    return [Unsuccessful(lease.job_id, lease.owner, ending, failure)]


def failed_instead(item: Finished, reason: str) -> Finished:
    """Return the outcome for one that the database refused for its data."""
    error = f"The database refused the outcome ({item.outcome.ending}): {reason}"
    return replace(item, outcome=Outcome(Ending.FAILED, error=error), progress=None)

"""The states of a job, and the one table that says which may follow which."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Word(StrEnum):
    """A value that is a word, and prints as one, also in dicts and dataclasses."""

    def __repr__(self) -> str:
        return repr(self.value)


class State(Word):
    """Where a job stands; stored by value."""

    SCHEDULED = "scheduled"  # run_after lies ahead
    BLOCKED = "blocked"  # an upstream is not done
    READY = "ready"
    LEASED = "leased"  # claimed by a worker
    RUNNING = "running"  # its handler is known to have started
    WAITING = "waiting"  # a container, or own work over with children still open
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Kind(Word):
    """What a row is: a job that runs, or a container that only holds others."""

    JOB = "job"
    CONTAINER = "container"


class UniqueWhile(StrEnum):
    """While what a job holds its unique key; stored by value."""

    WAITING = "waiting"  # until it is claimed for the first time
    LIVE = "live"  # until it has ended


TERMINAL: Final = frozenset({State.DONE, State.FAILED, State.CANCELLED})
IN_FLIGHT: Final = frozenset({State.LEASED, State.RUNNING})
OPEN: Final = frozenset(State) - TERMINAL
NOT_STARTED: Final = frozenset({State.BLOCKED, State.READY, State.SCHEDULED})

_BACK_IN_LINE: Final = frozenset({State.READY, State.SCHEDULED})

# What the path's writes keep to, although none looks here: the tests let SQLite refuse others.
MOVES: Final[dict[State, frozenset[State]]] = {
    State.SCHEDULED: frozenset({State.READY, State.CANCELLED, State.WAITING}),
    State.BLOCKED: frozenset({State.READY, State.SCHEDULED, State.WAITING, State.CANCELLED}),
    State.READY: frozenset({State.LEASED, State.SCHEDULED, State.CANCELLED, State.WAITING}),
    State.LEASED: TERMINAL | _BACK_IN_LINE | {State.RUNNING, State.WAITING},
    State.RUNNING: TERMINAL | _BACK_IN_LINE | {State.WAITING},
    State.WAITING: TERMINAL | {State.BLOCKED},
    State.DONE: frozenset({State.BLOCKED, State.WAITING}),  # opened again for what is below it
    State.FAILED: _BACK_IN_LINE | {State.BLOCKED, State.WAITING},
    State.CANCELLED: _BACK_IN_LINE | {State.BLOCKED, State.WAITING},
}

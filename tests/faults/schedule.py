"""Which faults happen when: drawn from a seed, and from nothing else."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What is done."""

    KILL = "kill -9 of a worker"
    FREEZE = "freeze of a worker"
    TERMINATE = "SIGTERM to a worker"
    CUT = "cut of all connections"
    STALL = "stall of all connections"
    DELAY = "delay on all connections"
    HALF_OPEN = "half-opening of all connections"
    REFUSE = "refusal of connections"
    STOP_SERVER = "restart of the server"
    KILL_SERVER = "kill of the server"
    HOLD_LOCK = "hold of the write lock"


@dataclass(frozen=True, slots=True)
class Plan:
    """How often a kind of fault happens, and how long it lasts, in seconds; once at least."""

    every: float
    shortest: float = 0.0
    longest: float = 0.0


PROCESSES: Final = {
    Kind.KILL: Plan(2.3),
    Kind.FREEZE: Plan(22.0, 0.5, 7.0),
    Kind.TERMINATE: Plan(60.0),
}
CONNECTIONS: Final = {
    Kind.CUT: Plan(22.0),
    Kind.STALL: Plan(60.0, 0.5, 5.0),
    Kind.DELAY: Plan(90.0, 2.0, 8.0),
    Kind.HALF_OPEN: Plan(90.0, 1.0, 6.0),
    Kind.REFUSE: Plan(90.0, 0.5, 5.0),
}
SERVER: Final = {
    Kind.STOP_SERVER: Plan(200.0, 0.1, 3.0),
    Kind.KILL_SERVER: Plan(200.0, 0.1, 3.0),
}
FILE: Final = {Kind.HOLD_LOCK: Plan(22.0, 0.5, 7.0)}
QUIET_START: Final = 1.0
"""Seconds without a fault, in which the first workers come up."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One fault: when it begins, whom it concerns, and how long it lasts, in seconds."""

    at: float
    kind: Kind
    slot: int
    lasts: float = 0.0


def faults_of(seed: int, seconds: float, plans: dict[Kind, Plan], slots: int) -> list[Fault]:
    """Draw the faults of a run, by their times.

    Each kind is drawn from numbers of its own, so that one that cannot happen here changes
    nothing about the others.
    """
    faults: list[Fault] = []
    for kind, plan in plans.items():
        draw = random.Random(f"{seed} {kind.name}")
        for _ in range(math.ceil(seconds / plan.every)):
            at = draw.uniform(min(QUIET_START, seconds / 2), seconds)
            lasts = draw.uniform(plan.shortest, plan.longest)
            faults.append(Fault(at, kind, draw.randrange(slots), lasts))
    return sorted(faults)

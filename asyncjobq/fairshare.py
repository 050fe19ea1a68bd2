"""Weighted fair share: which group gets the next free slot. Pure, without a database.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each group has a virtual time that advances
by its slot-seconds divided by its weight, and the group that is furthest behind goes next. The
time that a job will take is estimated at its start by the group's recent mean, raised when the job
takes longer, and corrected at its end. A group that is new or returns starts at the current virtual
time: it owes nothing for the past and is owed nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asyncjobq.backends.base import Lane, Take
from asyncjobq.clock import monotonic

_RECENT: Final = 0.2  # share of the newest run in a group's mean
_FIRST_GUESS: Final = 0.05  # seconds, until anything was measured
_REMEMBERED: Final = 20_000  # groups


@dataclass(slots=True, eq=False)
class Charge:
    """What a started job was charged with: more once it takes longer, and corrected at its end."""

    group: str
    weight: float
    seconds: float
    begun: float


class FairShare:
    """The virtual times of one worker's groups."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._running: set[Charge] = set()
        self._now = 0.0
        self._virtual: dict[str, float] = {}
        self._mean: dict[str, float] = {}
        self._overall = _FIRST_GUESS
        self._turn: dict[str, int] = {}
        self._turns = 0

    def allocate(
        self,
        lanes: Sequence[Lane],
        free: Mapping[str, int],
        slots: int,
        limited: Callable[[Lane], bool] = lambda lane: False,
    ) -> list[Take]:
        """Give `slots` one by one to groups; `free` bounds them by queue.

        Returns how many jobs to take from the lanes of each group in each queue; what is taken from
        a `limited` lane is said for that lane alone.
        """
        by_group: dict[str, list[Lane]] = {}
        for lane in sorted(lanes, key=lambda lane: lane.head_priority):
            by_group.setdefault(lane.group_key, []).append(lane)
        left = Counter(dict(free))
        counts: Counter[tuple[str, str, Lane | None]] = Counter()

        apart = {lane for lane in lanes if limited(lane)}

        def key_of(lane: Lane) -> tuple[str, str, Lane | None]:
            return lane.group_key, lane.queue, lane if lane in apart else None

        self._charge_more()
        self._advance(
            group
            for group, of_it in by_group.items()
            if any(left[lane.queue] > 0 for lane in of_it)
        )
        heap = [(*self._position(group), group) for group in by_group]
        heapq.heapify(heap)
        while heap and slots > 0:
            virtual, turn, group = heapq.heappop(heap)
            open_ = (lane for lane in by_group[group] if left[lane.queue] > 0)
            if apart:  # of one priority, each has its turn
                turns = lambda lane: (lane.head_priority, counts[key_of(lane)])  # noqa: E731
                first = min(open_, key=turns, default=None)
            else:
                first = next(open_, None)
            if first is None:
                continue
            counts[key_of(first)] += 1
            left[first.queue] -= 1
            slots -= 1
            step = self._estimate(group) / first.head_weight
            heapq.heappush(heap, (virtual + step, turn, group))
        return [
            Take((alone,) if alone else _together(by_group[group], queue, apart), count)
            for (group, queue, alone), count in counts.items()
        ]

    def start(self, group: str, weight: float) -> Charge:
        """Charge a group for a job that starts now."""
        begun, _ = self._position(group)
        charge = Charge(group, weight, self._estimate(group), self._clock())
        self._running.add(charge)
        self._virtual[group] = begun + charge.seconds / weight
        self._turns += 1
        self._turn[group] = self._turns
        if len(self._virtual) > _REMEMBERED:
            self._forget()
        return charge

    def finish(self, charge: Charge, seconds: float) -> None:
        """Correct a charge by the time that the job really held its slot."""
        group = charge.group
        self._running.discard(charge)
        self._overall += _RECENT * (seconds - self._overall)
        if group in self._virtual:
            mean = self._mean.get(group, seconds)
            self._mean[group] = mean + _RECENT * (seconds - mean)
            self._virtual[group] += (seconds - charge.seconds) / charge.weight

    def _charge_more(self) -> None:
        """Charge the jobs that run for longer than was expected with what they took so far."""
        now = self._clock()
        for charge in self._running:
            more = now - charge.begun - charge.seconds
            if more > 0 and charge.group in self._virtual:
                self._virtual[charge.group] += more / charge.weight
                charge.seconds += more

    def _advance(self, groups: Iterable[str]) -> None:
        """Move the current time up to the group that is furthest behind of those that can run.

        Not to one that starts a job: of several that start at once, one after the other, those
        that come later would lose what they are owed.
        """
        known = (self._virtual[group] for group in groups if group in self._virtual)
        self._now = max(self._now, min(known, default=self._now))

    def _position(self, group: str) -> tuple[float, int]:
        return max(self._virtual.get(group, self._now), self._now), self._turn.get(group, 0)

    def _estimate(self, group: str) -> float:
        return max(self._mean.get(group, self._overall), 1e-6)

    def _forget(self) -> None:
        """Drop the half that had no turn for longest; should they return, they are as if new."""
        for group in sorted(self._turn, key=self._turn.__getitem__)[: _REMEMBERED // 2]:
            del self._virtual[group], self._turn[group]
            self._mean.pop(group, None)


def _together(lanes: Sequence[Lane], queue: str, apart: set[Lane]) -> tuple[Lane, ...]:
    return tuple(lane for lane in lanes if lane.queue == queue and lane not in apart)

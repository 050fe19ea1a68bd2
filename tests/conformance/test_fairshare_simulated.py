"""Fair share over many settings, simulated: slots that end together or not, workers, run times.

Time is a number here, and jobs are but their ends; so thousands of them take milliseconds. What
holds is what is promised: slot-time within a tenth of the weights over 1,000 jobs, and starts too
where run times are equal, give or take the jobs that one cannot start half of.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncjobq.backends.base import Lane
from asyncjobq.fairshare import FairShare

JOBS: Final = 1000
WEIGHTS: Final = {"a": 1.0, "b": 2.0, "c": 5.0}

RunTime = Callable[[str], float]


@dataclass
class Cluster:
    """Workers with slots, and groups with backlogs; `backlog` is endless where it says nothing."""

    weights: Mapping[str, float]
    run_time: RunTime
    slots: int
    workers: int = 1
    backlog: Counter[str] | None = None
    starts: list[str] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)
    """Seconds of slots, by group."""

    def run(self, jobs: int = JOBS) -> None:
        """Start so many jobs."""
        shares = [FairShare(lambda: now) for _ in range(self.workers)]
        running: list[tuple[float, int, int, str, Any, float]] = []
        numbers, busy, now = itertools.count(), [0] * self.workers, 0.0

        def fill(worker: int) -> None:
            free = self.slots - busy[worker]
            takes = shares[worker].allocate(self._lanes(), {"default": free}, free)
            for take in takes:
                group = take.lanes[0].group_key
                for _ in range(min(take.count, self._left(group))):
                    end = now + self.run_time(group)
                    charge = shares[worker].start(group, self.weights[group])
                    heapq.heappush(running, (end, next(numbers), worker, group, charge, now))
                    busy[worker] += 1
                    self.starts.append(group)
                    if self.backlog is not None:
                        self.backlog[group] -= 1

        for worker in range(self.workers):
            fill(worker)
        while len(self.starts) < jobs and running:
            now = running[0][0]
            freed: set[int] = set()
            while running and running[0][0] <= now + 1e-9:
                _, _, worker, group, charge, begun = heapq.heappop(running)
                shares[worker].finish(charge, now - begun)
                self.used[group] += now - begun
                busy[worker] -= 1
                freed.add(worker)
            for worker in sorted(freed):
                fill(worker)
        for _, _, _, group, _, begun in running:
            self.used[group] += now - begun

    def _lanes(self) -> list[Lane]:
        groups = (group for group in self.weights if self._left(group))
        return [Lane("default", "work", "", group, 0, self.weights[group]) for group in groups]

    def _left(self, group: str) -> int:
        return JOBS if self.backlog is None else self.backlog[group]

    def assert_fair(self, of: Mapping[str, float], one: Callable[[str], float]) -> None:
        """Assert that shares follow the weights, but for `one` job of each group and worker."""
        total, weights = sum(of.values()), sum(self.weights.values())
        for group, weight in self.weights.items():
            fair = total * weight / weights
            allowed = 0.1 * fair + self.workers * one(group)
            assert abs(of[group] - fair) <= allowed, (group, of[group], fair)


def scattered(seconds: RunTime, seed: int) -> RunTime:
    """Let run times be anything, with this mean."""
    chance = random.Random(seed)
    return lambda group: chance.expovariate(1 / seconds(group))


class TestEqualRunTimes:
    @pytest.mark.parametrize("workers", [1, 2, 4, 8])
    @pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 7, 8, 10, 16, 33])
    def test_one_to_two_to_five(self, slots: int, workers: int) -> None:
        """Also where all slots are free at one moment, and a round of slots is no whole share."""
        cluster = Cluster(WEIGHTS, lambda _: 0.02, slots, workers)
        cluster.run()
        cluster.assert_fair(Counter(cluster.starts), one=lambda _: 1)
        cluster.assert_fair(cluster.used, one=lambda _: 0.02)

    @pytest.mark.parametrize("slots", [1, 4, 10])
    @pytest.mark.parametrize("seed", range(5))
    def test_of_any_distribution(self, slots: int, seed: int) -> None:
        """Of 1,000 of them, a group with an eighth has 125, whose sum is off by a tenth."""
        cluster = Cluster(WEIGHTS, scattered(lambda _: 0.1, seed), slots)
        cluster.run(4 * JOBS)
        cluster.assert_fair(cluster.used, one=lambda _: 0.5)

    @given(
        weights=st.lists(st.floats(1, 20), min_size=2, max_size=12),
        slots=st.integers(1, 40),
        workers=st.integers(1, 4),
    )
    @settings(deadline=None, max_examples=60)
    def test_of_any_weights(self, weights: list[float], slots: int, workers: int) -> None:
        by_group = {f"g{n:02}": weight for n, weight in enumerate(weights)}
        cluster = Cluster(by_group, lambda _: 0.02, slots, workers)
        cluster.run()
        cluster.assert_fair(Counter(cluster.starts), one=lambda _: 2)


class TestUnequalRunTimes:
    @pytest.mark.parametrize("weights", [WEIGHTS, dict.fromkeys(WEIGHTS, 1.0)])
    @pytest.mark.parametrize("slow", WEIGHTS)
    @pytest.mark.parametrize("slots", [1, 2, 4, 7, 10, 16, 32])
    def test_one_group_is_ten_times_slower(
        self, slots: int, slow: str, weights: dict[str, float]
    ) -> None:
        def run_time(group: str) -> float:
            return 0.2 if group == slow else 0.02

        cluster = Cluster(weights, run_time, slots)
        cluster.run()
        cluster.assert_fair(cluster.used, one=run_time)

    @pytest.mark.parametrize("slow", WEIGHTS)
    def test_in_several_workers(self, slow: str) -> None:
        def run_time(group: str) -> float:
            return 0.2 if group == slow else 0.02

        cluster = Cluster(WEIGHTS, run_time, 10, workers=4)
        cluster.run(4 * JOBS)
        cluster.assert_fair(cluster.used, one=run_time)


class TestHeadOfTheLine:
    @pytest.mark.parametrize("slots", [1, 4, 10, 50])
    @pytest.mark.parametrize("weight", [0.1, 1.0, 10.0])
    def test_few_behind_many_start_in_the_first_rounds(self, slots: int, weight: float) -> None:
        backlog = Counter({"many": 20_000, "ten": 10, "one": 1})
        weights = {"many": weight, "ten": 1.0, "one": 1.0}
        cluster = Cluster(weights, lambda _: 0.02, slots, backlog=backlog)
        cluster.run(500)
        first = cluster.starts[: max(3, 2 * slots)]
        assert "ten" in first
        assert "one" in first
        share = 1.0 / (2.0 + weight)  # while all three are there
        assert cluster.starts[: int(12 / share) + 2 * slots].count("ten") >= 9

    def test_no_slot_idles_while_there_is_work(self) -> None:
        chance = random.Random(5)
        for _ in range(50):
            backlog = Counter(
                {f"g{n}": chance.randrange(1, 30) for n in range(chance.randrange(1, 9))}
            )
            weights = {group: chance.uniform(0.1, 9) for group in backlog}
            total, slots = backlog.total(), chance.randrange(1, 9)
            cluster = Cluster(weights, lambda _: 1.0, slots, backlog=backlog)
            cluster.run(total)
            assert len(cluster.starts) == total

    def test_who_comes_and_goes_gets_its_share_of_the_time_it_was_there(self) -> None:
        share, counts = FairShare(), defaultdict(int)
        stays = Lane("default", "work", "", "stays", 0, 1.0)
        visits = Lane("default", "work", "", "visits", 0, 1.0)
        for n in range(3000):
            lanes = [stays, visits] if n // 100 % 2 else [stays]
            for take in share.allocate(lanes, {"default": 4}, 4):
                for _ in range(take.count):
                    group = take.lanes[0].group_key
                    share.finish(share.start(group, 1.0), 0.02)
                    counts[group, len(lanes)] += 1
        assert counts["visits", 2] == pytest.approx(counts["stays", 2], rel=0.05)

    def test_who_waits_for_a_slot_of_its_queue_holds_nobody_back(self) -> None:
        """A group of a queue without free slots is not what the current time goes by."""
        share = FairShare()
        stuck = Lane("full", "work", "", "stuck", 0, 1.0)
        busy = Lane("default", "work", "", "busy", 0, 1.0)
        share.finish(share.start("stuck", 1.0), 0.02)
        for _ in range(500):
            (take,) = share.allocate([stuck, busy], {"default": 1, "full": 0}, 1)
            share.finish(share.start(take.lanes[0].group_key, 1.0), 0.02)
        new = Lane("default", "work", "", "new", 0, 1.0)
        counts: Counter[str] = Counter()
        for _ in range(40):
            (take,) = share.allocate([stuck, busy, new], {"default": 1, "full": 0}, 1)
            counts[take.lanes[0].group_key] += 1
            share.finish(share.start(take.lanes[0].group_key, 1.0), 0.02)
        assert counts["new"] == pytest.approx(20, abs=2)

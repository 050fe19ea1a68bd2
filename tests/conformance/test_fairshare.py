"""Fair share, without a database: slots follow weights, every group gets its turn, none waits."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncjobq.backends.base import Lane
from asyncjobq.fairshare import FairShare

WEIGHTS = st.floats(min_value=0.01, max_value=1000.0)


def lane(
    group: str,
    weight: float = 1.0,
    *,
    queue: str = "default",
    type_name: str = "work",
    head: int = 0,
) -> Lane:
    return Lane(queue, type_name, "", group, head, weight)


class Worker:
    """Slots that run jobs of groups with endless backlogs, by a clock of its own."""

    def __init__(self, slots: int, run_time: Callable[[str], float] = lambda group: 1.0) -> None:
        self.share = FairShare(lambda: self._now)
        self.starts: list[str] = []
        self._slots = slots
        self._run_time = run_time
        self._now = 0.0
        self._running: list[tuple[float, int, object]] = []

    def run(self, weights: dict[str, float], starts: int) -> Counter[str]:
        """Start so many jobs of these groups; return how many of each."""
        lanes = [lane(group, weight) for group, weight in weights.items()]
        first = len(self.starts)
        while len(self.starts) - first < starts:
            free = self._slots - len(self._running)
            for take in self.share.allocate(lanes, {"default": free}, free):
                group = take.lanes[0].group_key
                for _ in range(take.count):
                    self._start(group, weights[group])
            self._finish_one()
        return Counter(self.starts[first : first + starts])

    def _start(self, group: str, weight: float) -> None:
        charge = self.share.start(group, weight)
        self.starts.append(group)
        end = self._now + self._run_time(group)
        heapq.heappush(self._running, (end, len(self.starts), (charge, self._run_time(group))))

    def _finish_one(self) -> None:
        self._now, _, ended = heapq.heappop(self._running)
        self.share.finish(*ended)  # type: ignore[misc]


class TestProportion:
    @pytest.mark.parametrize("slots", [1, 2, 4, 10, 33])
    def test_one_to_two_to_five(self, slots: int) -> None:
        worker = Worker(slots)
        weights = {"a": 1.0, "b": 2.0, "c": 5.0}
        worker.run(weights, 80)
        counts = worker.run(weights, 800)
        for group, weight in weights.items():
            assert counts[group] == pytest.approx(100 * weight, rel=0.1)

    @given(
        weights=st.lists(st.floats(min_value=1, max_value=8), min_size=2, max_size=6),
        slots=st.integers(1, 12),
        run_time=st.floats(min_value=0.001, max_value=1000),
    )
    @settings(deadline=None, max_examples=40)
    def test_follows_any_weights_when_run_times_are_equal(
        self, weights: list[float], slots: int, run_time: float
    ) -> None:
        worker = Worker(slots, lambda _: run_time)
        by_group = {f"g{n}": weight for n, weight in enumerate(weights)}
        worker.run(by_group, 100)
        counts = worker.run(by_group, 1000)
        for group, weight in by_group.items():
            share = 1000 * weight / sum(weights)
            assert counts[group] == pytest.approx(share, rel=0.1, abs=slots + 2)

    @pytest.mark.parametrize("slots", [1, 4])
    def test_counts_the_time_of_slots_and_not_starts(self, slots: int) -> None:
        times = {"short": 1.0, "long": 4.0}
        worker = Worker(slots, times.__getitem__)
        equal = {"short": 1.0, "long": 1.0}
        worker.run(equal, 50)
        counts = worker.run(equal, 500)
        assert counts["short"] * 1.0 == pytest.approx(counts["long"] * 4.0, rel=0.1)

    def test_does_not_depend_on_the_order_of_the_lanes(self) -> None:
        counts = [
            Worker(3).run(weights, 200) for weights in ({"a": 1.0, "b": 3.0}, {"b": 3.0, "a": 1.0})
        ]
        assert counts[0] == pytest.approx(counts[1], abs=2)


class TestTurns:
    @given(weights=st.lists(WEIGHTS, min_size=1, max_size=40), slots=st.integers(1, 8))
    @settings(deadline=None, max_examples=60)
    def test_every_group_gets_one_whatever_its_weight(
        self, weights: list[float], slots: int
    ) -> None:
        worker = Worker(slots)
        by_group = {f"g{n}": weight for n, weight in enumerate(weights)}
        counts = worker.run(by_group, len(weights) + slots)
        assert set(counts) == set(by_group)

    def test_go_round_with_more_groups_than_slots(self) -> None:
        worker = Worker(2)
        groups = {f"g{n}": 1.0 for n in range(25)}
        counts = worker.run(groups, 250)
        assert set(counts.values()) == {10}

    @given(late=WEIGHTS, before=st.integers(1, 300), slots=st.integers(1, 6))
    @settings(deadline=None, max_examples=40)
    def test_a_new_group_is_served_soon(self, late: float, before: int, slots: int) -> None:
        worker = Worker(slots)
        groups = {"a": 1.0, "b": 3.0}
        worker.run(groups, before)
        counts = worker.run({**groups, "late": late}, 2 * slots + 6)
        assert counts["late"] >= 1


class TestReturning:
    @pytest.mark.parametrize("away", [100, 5000])
    def test_is_owed_nothing_for_the_past(self, away: int) -> None:
        worker = Worker(2)
        both = {"here": 1.0, "away": 1.0}
        worker.run(both, 50)
        worker.run({"here": 1.0}, away)
        counts = worker.run(both, 100)
        assert counts["away"] == pytest.approx(50, abs=5)
        assert worker.starts[-100:-60].count("here") >= 15

    def test_does_not_wait_for_its_past_either(self) -> None:
        worker = Worker(2)
        worker.run({"greedy": 1.0}, 5000)
        counts = worker.run({"greedy": 1.0, "new": 1.0}, 100)
        assert counts["greedy"] == pytest.approx(50, abs=5)


QUEUES = ("default", "media", "mail")
LANES = st.lists(
    st.builds(
        lane,
        st.sampled_from([f"g{n}" for n in range(6)]),
        WEIGHTS,
        queue=st.sampled_from(QUEUES),
        type_name=st.sampled_from(["x", "y"]),
        head=st.integers(-5, 5),
    ),
    max_size=20,
    unique_by=lambda lane: lane.place,
)


class TestAllocation:
    @given(
        lanes=LANES,
        free=st.fixed_dictionaries({queue: st.integers(0, 5) for queue in QUEUES}),
        slots=st.integers(0, 12),
    )
    @settings(deadline=None)
    def test_leaves_no_slot_idle_and_gives_none_twice(
        self, lanes: Sequence[Lane], free: dict[str, int], slots: int
    ) -> None:
        takes = FairShare().allocate(lanes, free, slots)
        given_to: Counter[str] = Counter()
        for take in takes:
            assert take.count > 0
            assert len({(lane.queue, lane.group_key) for lane in take.lanes}) == 1
            given_to[take.lanes[0].queue] += take.count
        assert all(given_to[queue] <= free[queue] for queue in QUEUES)
        possible = sum(free[queue] for queue in {lane.queue for lane in lanes})
        assert given_to.total() == min(slots, possible)

    @given(lanes=LANES)
    @settings(deadline=None)
    def test_gives_a_group_all_of_its_lanes_in_a_queue(self, lanes: Sequence[Lane]) -> None:
        takes = FairShare().allocate(lanes, dict.fromkeys(QUEUES, 50), 100)
        for take in takes:
            queue, group = take.lanes[0].queue, take.lanes[0].group_key
            of_it = [lane for lane in lanes if (lane.queue, lane.group_key) == (queue, group)]
            assert sorted(take.lanes, key=repr) == sorted(of_it, key=repr)

    def test_of_nothing_is_nothing(self) -> None:
        assert FairShare().allocate([], {"default": 5}, 5) == []
        assert FairShare().allocate([lane("a")], {"default": 0}, 5) == []


def test_does_not_remember_every_group_that_ever_was() -> None:
    """A worker lives for months, and its groups may be a user each."""
    share = FairShare()
    for n in range(60_000):
        share.finish(share.start(f"g{n}", 1.0), 1.0)
    for remembered in (share._virtual, share._turn, share._mean):
        assert len(remembered) <= 20_000
    worker = Worker(2)
    worker.share = share
    assert worker.run({"a": 1.0, "b": 3.0}, 100)["b"] == pytest.approx(75, abs=8)

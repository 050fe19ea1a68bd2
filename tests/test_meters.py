"""The arithmetic of limits, without a database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncjobq import Budget, Concurrency, ConfigurationError, RateLimit
from asyncjobq.limits import joined, parted
from asyncjobq.meters import BudgetMeter, ConcurrencyMeter, Level, RateMeter

START = datetime(2026, 3, 1, tzinfo=UTC)
PAUSES = st.lists(st.floats(0, 20), min_size=1, max_size=60)


def taken(meter: object, wanted: int, cost: float = 1.0) -> int:
    """Let as many jobs start as may, up to `wanted`."""
    count = 0
    while count < wanted and meter.fits(cost):  # type: ignore[attr-defined]
        meter.take(cost)  # type: ignore[attr-defined]
        count += 1
    return count


class TestRate:
    @settings(max_examples=50, deadline=None)
    @given(PAUSES, st.floats(0.1, 50), st.integers(1, 20), st.integers(1, 30), st.floats(0, 2))
    def test_no_window_holds_more_than_it_may(
        self, pauses: list[float], rate: float, burst: int, wanted: int, delay: float
    ) -> None:
        """Wherever it begins, though jobs start some time after the decision."""
        limit = RateLimit("api", rate * 7, per=7, burst=burst)
        level, starts, now = Level(), [], START
        for pause in pauses:
            now += timedelta(seconds=pause)
            meter = RateMeter(limit, level, now)
            now += timedelta(seconds=delay)
            starts += [now] * taken(meter, wanted)
            level = meter.level(now)
        for first, begin in enumerate(starts):
            for last in range(first, len(starts)):
                window = (starts[last] - begin).total_seconds()
                assert last - first + 1 <= burst + rate * window + 1e-6

    @settings(max_examples=50, deadline=None)
    @given(st.floats(0.5, 50), st.integers(1, 5))
    def test_all_that_is_allowed_is_used_by_who_comes_back_when_told(
        self, rate: float, burst: int
    ) -> None:
        limit = RateLimit("api", rate, per=1, burst=burst)
        level, count, now = Level(), 0, START
        while now < START + timedelta(seconds=20):
            meter = RateMeter(limit, level, now)
            count += taken(meter, 100)
            level = meter.level(now)
            # Rounded up to what a clock shows.
            now += timedelta(seconds=RateMeter(limit, level, now).wait(), microseconds=1)
        assert count >= 0.99 * rate * 20

    def test_a_clock_that_is_set_back_gives_nothing_twice(self) -> None:
        limit = RateLimit("api", 1, per=1)
        meter = RateMeter(limit, Level(), START)
        assert taken(meter, 5) == 1
        level = meter.level(START)
        back = RateMeter(limit, level, START - timedelta(hours=1))
        assert taken(back, 5) == 0
        again = back.level(START - timedelta(hours=1))
        assert taken(RateMeter(limit, again, START + timedelta(seconds=1)), 5) == 1

    def test_a_rate_of_nothing(self) -> None:
        meter = RateMeter(RateLimit("api", 0, per=1), Level(0.0, START), START)
        assert meter.room() == 0
        assert meter.wait() == float("inf")


class TestBudget:
    def test_windows_begin_at_the_same_times_everywhere(self) -> None:
        limit = Budget("tokens", 10, per=timedelta(days=1))
        evening = START + timedelta(hours=23)
        meter = BudgetMeter(limit, Level(), evening)
        assert taken(meter, 9, cost=4) == 2
        assert meter.wait() == 3600
        level = meter.level(evening)
        assert level.moment == START
        assert taken(BudgetMeter(limit, level, evening), 9, cost=4) == 0
        assert taken(BudgetMeter(limit, level, evening), 9, cost=2) == 1
        assert taken(BudgetMeter(limit, level, START + timedelta(days=1)), 9, cost=4) == 2

    def test_what_was_overspent_is_paid_back(self) -> None:
        limit = Budget("tokens", 10, per=60)
        meter = BudgetMeter(limit, Level(), START)
        assert taken(meter, 1, cost=5) == 1
        meter.correct(+20, START)
        level = meter.level(START)
        assert BudgetMeter(limit, level, START).room() == 0
        next_ = BudgetMeter(limit, level, START + timedelta(seconds=60))
        assert next_.room() == 0
        assert next_.used == 15
        third = BudgetMeter(limit, level, START + timedelta(seconds=120))
        assert taken(third, 9, cost=5) == 1

    def test_a_job_that_cost_less_gives_back_to_its_own_window(self) -> None:
        limit = Budget("tokens", 10, per=60)
        meter = BudgetMeter(limit, Level(), START)
        assert taken(meter, 2, cost=5) == 2
        meter.correct(-3, START)
        assert taken(meter, 9, cost=3) == 1
        later = BudgetMeter(limit, meter.level(START), START + timedelta(seconds=61))
        later.correct(-3, START)
        assert later.used == 0
        assert taken(later, 9, cost=5) == 2

    def test_a_job_that_costs_more_than_all_waits_for_an_untouched_window(self) -> None:
        limit = Budget("tokens", 10, per=60)
        meter = BudgetMeter(limit, Level(), START)
        meter.take(1)
        assert not meter.fits(25)
        fresh = BudgetMeter(limit, meter.level(START), START + timedelta(seconds=60))
        assert taken(fresh, 2, cost=25) == 1
        level = fresh.level(START)
        assert BudgetMeter(limit, level, START + timedelta(seconds=179)).room() == 0
        assert BudgetMeter(limit, level, START + timedelta(seconds=180)).fits(5)


def test_concurrency() -> None:
    meter = ConcurrencyMeter(Concurrency("gpu", 3), live=1)
    assert taken(meter, 9) == 2
    assert meter.wait() is None
    assert ConcurrencyMeter(Concurrency("gpu", 1), live=3).room() == 0


class TestKeys:
    @settings(max_examples=50, deadline=None)
    @given(st.dictionaries(st.sampled_from(["tenant", "model"]), st.text(max_size=40)))
    def test_are_told_apart(self, values: dict[str, str]) -> None:
        assert len(joined(values)) <= 128
        found = parted(joined(values))
        assert found.keys() == values.keys()
        if not any(value.startswith("#") for value in found.values()):
            assert found == values

    def test_long_ones_by_their_digest(self) -> None:
        first, second = (joined({"tenant": "x" * 200 + end, "model": "m"}) for end in "ab")
        assert first != second
        assert parted(first).keys() == {"tenant", "model"}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Concurrency("gpu", -1), "most of the limit 'gpu' must be an int of at least 0"),
        (lambda: Concurrency("gpu", 1.5), "most of the limit 'gpu' must be an int"),
        (lambda: RateLimit("api", 5, per=0), "per of the limit 'api' must be 0.001 s to"),
        (lambda: RateLimit("api", 5, per=1, burst=0), "burst of the limit 'api' must be an int"),
        (lambda: RateLimit("api", float("nan"), per=1), "amount of the limit 'api'"),
        (lambda: Budget("", 5, per=1), "name is a str of 1 to 64 characters"),
        (lambda: Budget("b", 5, per=1, key=3), "key is a str of 1 to 64 characters"),
    ],
)  # fmt: skip
def test_bad_numbers_are_refused(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=reason):
        make()

"""When cron expressions and intervals fire, above all where clocks are put forward and back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncjobq import ConfigurationError
from asyncjobq.cron import Cron, Every, Recurrence, interval_of, times_between

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
# The days on which clocks are changed, and one on which they are not.
DAYS = {
    BERLIN: ["2026-03-29", "2026-10-25", "2026-06-01"],
    NEW_YORK: ["2026-03-08", "2026-11-01", "2026-06-01"],
}


def at(text: str, zone: str = BERLIN, *, fold: int = 0) -> datetime:
    """Return the moment that a local time names; with `fold`, the second one."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).astimezone(UTC)


def times(recurrence: Recurrence, begin: datetime, end: datetime) -> list[datetime]:
    """Return all times after `begin` up to `end`."""
    found = []
    time = recurrence.after(begin)
    while time is not None and time <= end:
        found.append(time)
        time = recurrence.after(time)
    return found


def local_times(expression: str, zone: str, day: str) -> list[str]:
    """Return the times of a day as the clock on the wall shows them, with its distance to UTC."""
    begin, end = at(f"{day}T00:00", zone), at(f"{day}T23:59:59", zone)
    found = times(Cron(expression, zone), begin - timedelta(seconds=1), end)
    return [time.astimezone(ZoneInfo(zone)).strftime("%H:%M%z") for time in found]


class TestChangedClocks:
    """Berlin goes from +01:00 to +02:00 at 02:00 local time, and back at 03:00."""

    @pytest.mark.parametrize(
        ("expression", "expected"),
        [
            ("30 2 * * *", ["03:00+0200"]),
            ("0 30 2 * * *", ["03:00+0200"]),
            ("0,30 2 * * *", ["03:00+0200"]),
            ("30 2,3 * * *", ["03:00+0200", "03:30+0200"]),
            ("0 3 * * *", ["03:00+0200"]),
            ("0 1,2,3 * * *", ["01:00+0100", "03:00+0200"]),
            ("0 1-4 * * *", ["01:00+0100", "03:00+0200", "04:00+0200"]),
            ("30 1 * * *", ["01:30+0100"]),
            ("@daily", ["00:00+0100"]),
            ("*/30 2 * * *", []),
            ("*/30 1-3 * * *", ["01:00+0100", "01:30+0100", "03:00+0200", "03:30+0200"]),
        ],
    )
    def test_forward(self, expression: str, expected: list[str]) -> None:
        assert local_times(expression, BERLIN, "2026-03-29") == expected

    @pytest.mark.parametrize(
        ("expression", "expected"),
        [
            ("30 2 * * *", ["02:30+0200"]),
            ("0 30 2 * * *", ["02:30+0200"]),
            ("0 1-4 * * *", ["01:00+0200", "02:00+0200", "03:00+0100", "04:00+0100"]),
            ("*/30 2 * * *", ["02:00+0200", "02:30+0200", "02:00+0100", "02:30+0100"]),
            ("*/30 2-3 * * *", [
                "02:00+0200", "02:30+0200", "02:00+0100", "02:30+0100", "03:00+0100", "03:30+0100",
            ]),
        ],
    )  # fmt: skip
    def test_back(self, expression: str, expected: list[str]) -> None:
        assert local_times(expression, BERLIN, "2026-10-25") == expected

    def test_asked_between_the_two_occurrences_of_a_time(self) -> None:
        second = at("2026-10-25T02:10", fold=1)
        assert Cron("30 2 * * *", BERLIN).after(second) == at("2026-10-26T02:30")
        assert Cron("*/30 2 * * *", BERLIN).after(second) == at("2026-10-25T02:30", fold=1)

    def test_every_hour_and_every_second_never_pause(self) -> None:
        for day in ("2026-03-29", "2026-10-25"):
            begin = at(f"{day}T00:00")
            hours = times(Cron("0 * * * *", BERLIN), begin, begin + timedelta(hours=6))
            assert hours == [begin + timedelta(hours=n) for n in range(1, 7)]
        begin = at("2026-10-25T02:59:30")
        seconds = times(Cron("* * * * * *", BERLIN), begin, begin + timedelta(minutes=1))
        assert seconds == [begin + timedelta(seconds=n) for n in range(1, 61)]

    def test_a_day_without_midnight(self) -> None:
        zone = "Africa/Cairo"  # 2026-04-24 begins at 01:00
        assert local_times("0 0 * * *", zone, "2026-04-24") == ["01:00+0300"]
        assert local_times("*/30 0 * * *", zone, "2026-04-24") == []
        assert local_times("*/30 0-1 * * *", zone, "2026-04-24") == ["01:00+0300", "01:30+0300"]

    def test_clocks_that_change_by_half_an_hour(self) -> None:
        assert local_times("15 2 * * *", LORD_HOWE, "2026-10-04") == ["02:30+1100"]
        assert local_times("45 1 * * *", LORD_HOWE, "2026-04-05") == ["01:45+1100"]


FIELDS = {
    "second": ["0", "30", "*/20"],
    "minute": ["0", "15", "59", "*", "*/30", "0,45", "20-40/10"],
    "hour": ["0", "1", "2", "3", "*", "*/2", "1-3", "2,3"],
    "day": ["*", "29", "1,8,25", "L"],
    "weekday": ["*", "0", "SUN", "1-5"],
}


@st.composite
def expressions(draw: st.DrawFn) -> str:
    names = (
        ["minute", "hour", "day"] if draw(st.booleans()) else ["second", "minute", "hour", "day"]
    )
    fields = [draw(st.sampled_from(FIELDS[name])) for name in names]
    return " ".join([*fields, "*", draw(st.sampled_from(FIELDS["weekday"]))])


@st.composite
def moments(draw: st.DrawFn) -> tuple[str, datetime]:
    """Return a zone, and a moment within hours of a change of its clocks, or far from one."""
    zone = draw(st.sampled_from(sorted(DAYS)))
    day = draw(st.sampled_from(DAYS[zone]))
    return zone, at(f"{day}T00:00", zone) + timedelta(seconds=draw(st.integers(-7200, 6 * 3600)))


def matches(expression: str, local: datetime) -> bool:
    """Tell whether a time on the wall is one of an expression, by the book of cron."""
    second, minute, hour, day, _, weekday = ["0", *expression.split()][-6:]
    on_day = _is_in(day, local.day, 31) or (day == "L" and (local + timedelta(days=1)).day == 1)
    on_weekday = _is_in(weekday.replace("SUN", "0"), local.isoweekday() % 7, 7)
    either = not day.startswith("*") and not weekday.startswith("*")
    return (
        _is_in(second, local.second, 59)
        and _is_in(minute, local.minute, 59)
        and _is_in(hour, local.hour, 23)
        and (on_day or on_weekday if either else on_day and on_weekday)
    )


def _is_in(field: str, value: int, last: int) -> bool:
    for part in field.split(","):
        range_, _, step = part.partition("/")
        first, _, end = range_.replace("*", f"0-{last}").partition("-")
        if first != "L" and value in range(int(first), int(end or first) + 1, int(step or 1)):
            return True
    return False


def expected_between(expression: str, zone: str, begin: datetime, end: datetime) -> list[datetime]:
    """Return the times after `begin` up to `end`, by looking at each tenth second on the wall."""
    minute, hour = expression.split()[-5:-3]
    named = not minute.startswith("*") and not hour.startswith("*")
    where = ZoneInfo(zone)
    found = (
        _by_name(expression, where, begin, end)
        if named
        else _by_wall(expression, where, begin, end)
    )
    return sorted(time for time in found if begin < time <= end)


STEP = timedelta(seconds=10)


def _by_wall(expression: str, zone: tzinfo, begin: datetime, end: datetime) -> set[datetime]:
    return {
        time
        for time in _steps(begin, end)
        if matches(expression, time.astimezone(zone).replace(tzinfo=None))
    }


def _by_name(expression: str, zone: tzinfo, begin: datetime, end: datetime) -> set[datetime]:
    first, last = (moment.astimezone(zone).replace(tzinfo=None, fold=0) for moment in (begin, end))
    hours = timedelta(hours=2)
    return {
        _first_shown(local, zone)
        for local in _steps(first - hours, last + hours)
        if matches(expression, local)
    }


def _steps(begin: datetime, end: datetime) -> list[datetime]:
    begin = begin.replace(second=0)
    return [begin + n * STEP for n in range((end - begin) // STEP + 1)]


def _first_shown(local: datetime, zone: tzinfo) -> datetime:
    """Return when the clock first shows this time, or a later one if it is never shown."""
    before, after = (local.replace(tzinfo=zone, fold=fold) for fold in (0, 1))
    if before.astimezone(UTC).astimezone(zone).replace(tzinfo=None) == local:
        return before.astimezone(UTC)
    earliest, latest = after.astimezone(UTC), before.astimezone(UTC)
    offset = earliest.astimezone(zone).utcoffset()
    return next(t for t in _steps(earliest, latest) if t.astimezone(zone).utcoffset() != offset)


@settings(max_examples=40, deadline=None)
@given(expression=expressions(), where=moments())
def test_against_every_tick_of_the_clock(expression: str, where: tuple[str, datetime]) -> None:
    zone, begin = where
    end = begin + timedelta(hours=6)
    found = times(Cron(expression, zone), begin, end)
    assert found == expected_between(expression, zone, begin, end)


@settings(max_examples=60, deadline=None)
@given(expression=expressions(), where=moments(), ask=st.integers(0, 4 * 3600))
def test_asked_at_any_moment_the_answer_is_the_same(
    expression: str, where: tuple[str, datetime], ask: int
) -> None:
    """The next time depends on nothing but the moment, and always lies after it."""
    zone, begin = where
    cron, moment = Cron(expression, zone), begin + timedelta(seconds=ask, microseconds=ask)
    line = times(cron, begin, moment + timedelta(hours=6))
    assert all(earlier < later for earlier, later in pairwise(line))
    following = [time for time in line if time > moment]
    found = cron.after(moment)
    assert found is not None
    assert found > moment
    assert found.tzinfo is UTC
    assert following[:1] in ([found], [])


class TestExpressions:
    def test_seconds_come_first(self) -> None:
        noon = datetime(2026, 6, 1, 12, tzinfo=UTC)
        assert Cron("*/1 * * * * *").after(noon) == noon + timedelta(seconds=1)
        assert Cron("30 * * * * *").after(noon) == noon + timedelta(seconds=30)
        assert Cron("* * * * *").after(noon) == noon + timedelta(minutes=1)

    def test_words_for_the_usual_ones(self) -> None:
        noon = datetime(2026, 6, 3, 12, 30, tzinfo=UTC)
        assert Cron("@hourly").after(noon) == datetime(2026, 6, 3, 13, tzinfo=UTC)
        assert Cron("@Daily").after(noon) == datetime(2026, 6, 4, tzinfo=UTC)
        assert Cron("@weekly").after(noon) == datetime(2026, 6, 7, tzinfo=UTC)
        assert Cron("@monthly").after(noon) == datetime(2026, 7, 1, tzinfo=UTC)
        assert Cron("@yearly").after(noon) == datetime(2027, 1, 1, tzinfo=UTC)

    def test_rare_days(self) -> None:
        begin = datetime(2026, 6, 3, tzinfo=UTC)
        assert Cron("0 0 29 2 *").after(begin) == datetime(2028, 2, 29, tzinfo=UTC)
        assert Cron("0 0 L 2 *").after(begin) == datetime(2027, 2, 28, tzinfo=UTC)
        assert Cron("0 9 * * MON#1").after(begin) == datetime(2026, 7, 6, 9, tzinfo=UTC)

    @pytest.mark.parametrize(
        ("expression", "reason"),
        [
            ("61 * * * *", "its minute field is '61', which must be made of 0-59"),
            ("61 0 * * * *", "its second field is '61'"),
            ("* 24 * * *", "its hour field is '24'"),
            ("* * 0 * *", "its day-of-month field is '0'"),
            ("0 0 30 2 *", "its day-of-month field is '30'.*as far as its months have them"),
            ("* * * XYZ *", "its month field is 'XYZ'"),
            ("* * * * 8", "its day-of-week field is '8'"),
            ("*/0 * * * *", "its minute field"),
            ("5-1 * * * *", "its minute field"),
            ("* * *", "it has 3 fields; five are needed"),
            ("", "it has 0 fields"),
            ("@reboot", "it has 1 fields"),
            ("* * * * 1L/2", "day-of-week"),
            ("* * */20 * 1L", "names no date that ever comes"),
            (5, "takes an expression"),
            ("* " * 200, "up to 255 characters"),
        ],
    )
    def test_what_is_wrong_is_said(self, expression: str, reason: str) -> None:
        with pytest.raises(ConfigurationError, match=reason):
            Cron(expression)

    @pytest.mark.parametrize("zone", ["Europe/Berln", "", "../etc/passwd", "Europe", None, 5])
    def test_unknown_zones(self, zone: str) -> None:
        with pytest.raises(ConfigurationError, match=r"Europe/Berlin.*install the package tzdata"):
            Cron("* * * * *", zone)


class TestIntervals:
    def test_keep_their_phase(self) -> None:
        anchor = datetime(2026, 1, 1, tzinfo=UTC)
        every = Every(1 / 3 + 1, anchor)
        moment = anchor
        for number in range(1, 1000):
            following = every.after(moment)
            assert following == anchor + number * timedelta(seconds=every.interval)
            moment = following

    def test_whenever_asked(self) -> None:
        anchor = datetime(2026, 1, 1, tzinfo=UTC)
        late = anchor + timedelta(days=400, seconds=5)
        assert Every(60.0, anchor).after(late) == anchor + timedelta(days=400, seconds=60)
        assert Every(60.0, anchor).after(anchor - timedelta(seconds=1)) == anchor

    @pytest.mark.parametrize("every", [0, -1, 0.5, float("nan"), "60", True, timedelta(0), 1e12])
    def test_what_is_none(self, every: float) -> None:
        with pytest.raises(ConfigurationError, match="every must be"):
            interval_of(every)


class TestTimesBetween:
    BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
    END = datetime(2026, 1, 1, tzinfo=UTC)

    def test_both_ends_included(self) -> None:
        daily = Cron("@daily")
        found = times_between(daily, self.BEGIN, self.END, 1000)
        assert (len(found), found[0], found[-1]) == (366, self.BEGIN, self.END)

    def test_the_last_of_many(self) -> None:
        """Without walking through the thirty million seconds before."""
        found = times_between(Cron("* * * * * *"), self.BEGIN, self.END, 5)
        assert found == [self.END - timedelta(seconds=n) for n in range(4, -1, -1)]
        assert times_between(Cron("@yearly"), self.BEGIN, self.END, 1) == [self.END]

    def test_none(self) -> None:
        noon = datetime(2025, 1, 1, 12, tzinfo=UTC)
        assert times_between(Cron("@daily"), noon, noon + timedelta(hours=1), 5) == []

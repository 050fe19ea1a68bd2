"""When a recurring job fires: cron expressions in a time zone, and fixed intervals.

Pure: the moment from which on to look is passed in. Where a zone's clocks are changed, the rules
are those of cron(8) on Debian, for expressions with seconds too:

- An expression that names its hours and minutes (neither begins with `*`) fires for each of its
  times once a day: for a time that is skipped, at the first moment after the gap; for one that
  comes twice, at the first.
- Any other, such as `*/15 * * * *`, fires whenever the clock on the wall matches: not in the gap,
  and in both of two hours that have one name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, Protocol
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from asyncjobq.clock import seconds
from asyncjobq.errors import ConfigurationError

SHORTEST: Final = 1.0
"""Seconds between two times at least."""
LONGEST: Final = 100 * 365 * 86_400.0

_MACROS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_FIELDS: Final = ("second", "minute", "hour", "day-of-month", "month", "day-of-week")
_VALUES: Final = (
    "0-59",
    "0-59",
    "0-23",
    "1-31 or L, as far as its months have them",
    "1-12 or JAN-DEC",
    "0-7 or SUN-SAT",
)


class Recurrence(Protocol):
    """An endless line of moments."""

    def after(self, moment: datetime) -> datetime | None:
        """Return the first time after a moment, in UTC; None if there is none in fifty years."""


@dataclass(frozen=True)
class Every:
    """A fixed interval in seconds, counted from an anchor, so that it never drifts."""

    interval: float
    anchor: datetime

    def after(self, moment: datetime) -> datetime:
        step = timedelta(seconds=self.interval)
        return self.anchor + step * ((moment - self.anchor) // step + 1)


@dataclass(frozen=True)
class Cron:
    """A cron expression of five fields, or six with seconds first, in a time zone.

    Raises ConfigurationError saying what is wrong with either.
    """

    expression: str
    timezone: str = "UTC"
    _zone: tzinfo = field(init=False, repr=False, compare=False)
    _spelled: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_zone", zone_of(self.timezone))
        object.__setattr__(self, "_spelled", _checked_expression(self.expression))
        if self.after(datetime(2024, 1, 1, tzinfo=UTC)) is None:
            raise ConfigurationError(f"cron={self.expression!r} names no date that ever comes.")

    def after(self, moment: datetime) -> datetime | None:
        local = moment.astimezone(self._zone)
        times = self._by_name(local) if self._names_its_times else self._by_the_wall(local)
        return next((time for time in times if time > moment), None)

    @property
    def _names_its_times(self) -> bool:
        minute, hour = self._spelled.split()[-5:-3]
        return not minute.startswith("*") and not hour.startswith("*")

    def _by_name(self, local: datetime) -> Iterator[datetime]:
        """Yield the moments of all local times that match, each once."""
        for time in CronSim(self._spelled, local.replace(tzinfo=None, fold=0)):
            named = time.replace(tzinfo=self._zone)
            while _is_skipped(named):
                named = named.replace(second=0) + timedelta(minutes=1)
            yield named.astimezone(UTC)

    def _by_the_wall(self, local: datetime) -> Iterator[datetime]:
        """Yield all moments at which the local time matches."""
        times = CronSim(self._spelled, local)
        while (time := next(times, None)) is not None:
            if not _is_skipped(time):
                yield time.astimezone(UTC)
                continue
            # A day that has no midnight: look again from the moment at which it begins.
            begin = time.astimezone(UTC) - timedelta(seconds=1)
            times = CronSim(self._spelled, begin.astimezone(self._zone))


def times_between(
    recurrence: Recurrence, begin: datetime, end: datetime, most: int
) -> list[datetime]:
    """Return the times from `begin` to `end`, both included; the last `most` of them.

    Takes time by `most` and not by the number of all, which may be the seconds of a year.
    """
    span = timedelta(minutes=1)
    while True:
        start = max(begin, end - span)
        found = _times_from(recurrence, start, end, most)
        if start == begin or len(found) >= most:
            return found
        span *= 2


def _times_from(
    recurrence: Recurrence, begin: datetime, end: datetime, most: int
) -> list[datetime]:
    found: list[datetime] = []
    time = recurrence.after(begin - timedelta(microseconds=1))
    while time is not None and time <= end:
        found.append(time)
        time = recurrence.after(time)
    return found[-most:]


def zone_of(name: str) -> tzinfo:
    """Return the time zone of this name; raises ConfigurationError saying where to get it."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"timezone={name!r} is not known here. Time zones have names such as "
            "'Europe/Berlin'; where the system brings none (Windows, small containers), install "
            "the package tzdata."
        ) from error


def interval_of(every: Any) -> float:
    """Return an interval in seconds; raises ConfigurationError if there is no living by it."""
    interval = seconds(every, "every")
    if not SHORTEST <= interval <= LONGEST:
        raise ConfigurationError(
            f"every must be at least {SHORTEST:g} second and at most a century, not {every!r}."
        )
    return interval


def _is_skipped(local: datetime) -> bool:
    """Tell whether no clock ever shows this time."""
    there_and_back = local.astimezone(UTC).astimezone(local.tzinfo)
    return there_and_back.replace(tzinfo=None) != local.replace(tzinfo=None)


def _checked_expression(given: Any) -> str:
    if not isinstance(given, str) or len(given) > 255:
        raise ConfigurationError(
            f"cron takes an expression of up to 255 characters, not {given!r}."
        )
    spelled = _MACROS.get(given.strip().lower(), given)
    try:
        CronSim(spelled, datetime(2024, 1, 1))  # noqa: DTZ001  it asks for local times
    except Exception as error:  # assertions of the parser too
        raise ConfigurationError(
            f"cron={given!r} is not a cron expression: {_reason(spelled, error)}."
        ) from error
    return spelled


def _reason(spelled: str, error: Exception) -> str:
    parts = spelled.split()
    if len(parts) not in (5, 6):
        return (
            f"it has {len(parts)} fields; five are needed (minute, hour, day of the month, month, "
            "day of the week), or six with seconds first"
        )
    first = 6 - len(parts)
    for name, values, part in zip(_FIELDS[first:], _VALUES[first:], parts, strict=True):
        if isinstance(error, CronSimError) and str(error) == f"Bad {name}":
            return (
                f"its {name} field is {part!r}, which must be made of {values}: one, *, or a "
                "list, range or step of them"
            )
    return "it is not understood"

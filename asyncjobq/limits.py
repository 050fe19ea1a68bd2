"""External limits as users write them: what caps how many jobs run or start, everywhere at once.

Attach them to a handler (`limits=`), or to a scheduler for all its jobs or those of one queue. Two
handlers share a limit by naming it alike. With a `key`, there is one such limit for each value: of
an argument of that name, or of the group with `key="group_key"`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from asyncjobq.clock import seconds
from asyncjobq.errors import ConfigurationError

GROUP: Final = "group_key"
"""The `key` that stands for the job's group."""

MOST: Final = 1e15
"""Of what a limit allows and a job costs: sums of them stay exact to a tenth."""

LONGEST_PERIOD: Final = 1e9
SHORTEST_PERIOD: Final = 1e-3

LONGEST_KEY: Final = 128
_DIGEST: Final = 24


@dataclass(frozen=True)
class Limit:
    """What all limits have: a name, perhaps a key, perhaps the one queue that they are for."""

    name: str
    key: str | None = field(default=None, kw_only=True)
    queue: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for option in ("name", "key", "queue"):
            value = getattr(self, option)
            optional = value is None and option != "name"
            if not optional and (not isinstance(value, str) or not 1 <= len(value) <= 64):
                raise ConfigurationError(
                    f"A limit's {option} is a str of 1 to 64 characters, not {value!r}."
                )

    @property
    def argument(self) -> str | None:
        """The argument by whose values there are several such limits."""
        return None if self.key == GROUP else self.key

    def _check_number(
        self, option: str, *, least: float, most: float = MOST, whole: bool = False
    ) -> None:
        value = getattr(self, option)
        kinds: Any = int if whole else int | float
        good = isinstance(value, kinds) and not isinstance(value, bool)
        if not good or not least <= value <= most:
            kind = "an int" if whole else "a number"
            above = good and value > most
            bound = f"of at most {most:g}" if above else f"of at least {least:g}"
            raise ConfigurationError(
                f"{option} of the limit {self.name!r} must be {kind} {bound}, not "
                f"{repr(value)[:50]}."
            )


@dataclass(frozen=True)
class Concurrency(Limit):
    """At most `most` jobs run at a time."""

    most: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("most", least=0, whole=True)


@dataclass(frozen=True)
class RateLimit(Limit):
    """At most `burst + amount / per * w` jobs start in any `w` seconds (a token bucket).

    `per` is seconds or a timedelta. With a `burst` of 1, starts are spread evenly.
    """

    amount: float
    per: float | timedelta = field(kw_only=True)
    burst: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("amount", least=0)
        self._check_number("burst", least=1, most=2**31 - 1, whole=True)
        object.__setattr__(self, "per", _period(self.name, self.per))


@dataclass(frozen=True)
class Budget(Limit):
    """The costs of the jobs that start in a window of `per` seconds add up to `amount` at most.

    Windows are fixed in UTC: those of 86,400 s begin at midnight. A job's cost is its option
    `cost`, and corrected by its handler with `ctx.set_cost()` once it is known. What is spent
    beyond the amount in this way is taken from the windows that follow. A job that costs more than
    a whole window waits for one in which nothing was spent, and is paid back likewise.
    """

    amount: float
    per: float | timedelta = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("amount", least=0)
        object.__setattr__(self, "per", _period(self.name, self.per))


@dataclass(frozen=True)
class Capacity(Limit):
    """What an `async def` answers: how many more jobs may start in this process now.

    It is asked before each claim. While it raises or does not answer, no job that it guards starts.
    """

    free: Callable[[], Awaitable[float]] = field(compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key is not None:
            raise ConfigurationError(f"The capacity {self.name!r} cannot have a key.")
        if not callable(self.free):
            raise ConfigurationError(
                f"The capacity {self.name!r} takes an async def that returns how many more jobs "
                f"may start, not {self.free!r}."
            )


def amount_of(limit: Limit) -> float:
    """Return what a limit allows by the code; a capacity, anything."""
    if isinstance(limit, Concurrency):
        return limit.most
    return limit.amount if isinstance(limit, RateLimit | Budget) else math.inf


def joined(values: Mapping[str, str]) -> str:
    """Return the values of a job's keyed limits as one text of at most 128 characters.

    Where they are too long, each stands there by its SHA-256, and so does one with a NUL, which
    not every database stores.
    """
    values = {
        name: f"#{_digest(value)}" if "\0" in value else value for name, value in values.items()
    }
    text = urlencode(sorted(values.items()))
    if len(text) <= LONGEST_KEY:
        return text
    return urlencode({name: f"#{_digest(values[name])}" for name in sorted(values)}, safe="#")


def parted(limit_key: str) -> dict[str, str]:
    """Return the values that `joined` put together."""
    return dict(parse_qsl(limit_key, keep_blank_values=True))


def check_fits(owner: str, arguments: Iterable[str]) -> None:
    """Raise ConfigurationError if the values of so many keys do not fit into one text."""
    names = sorted(arguments)
    if len(joined(dict.fromkeys(names, "x" * LONGEST_KEY))) > LONGEST_KEY:
        raise ConfigurationError(
            f"{owner} has limits keyed by {', '.join(names)}: too many, or names that are too "
            "long. Key them by fewer or shorter arguments."
        )


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:_DIGEST]


def _period(name: str, value: float | timedelta) -> float:
    number = seconds(value, f"per of the limit {name!r}")
    if not SHORTEST_PERIOD <= number <= LONGEST_PERIOD:
        raise ConfigurationError(
            f"per of the limit {name!r} must be {SHORTEST_PERIOD:g} s to {LONGEST_PERIOD:g} s, "
            f"not {value!r}."
        )
    return number

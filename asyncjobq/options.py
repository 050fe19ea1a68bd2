"""What callers hand in: a `JobSpec` with its `JobOptions`, checked as it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Generic, Self, TypedDict, Unpack

from asyncjobq import codec
from asyncjobq.clock import aware_utc, is_finite, seconds
from asyncjobq.errors import ArgumentsError, ConfigurationError, InvalidJobError
from asyncjobq.job import Job, JobRef, Node, OnFailure, R, Upstream, id_of
from asyncjobq.limits import MOST
from asyncjobq.models import DEFAULT_PRIORITY
from asyncjobq.states import UniqueWhile

LONGEST: Final = 100 * 365 * 86_400.0
"""Seconds that a job may be told to run or to wait; more might end beyond the calendar."""

NO_TIMEOUT: Final = 0.0
"""How `timeout=None` is stored; NULL stands for the handler's timeout."""


class OnConflict(StrEnum):
    """What is done when another job holds the unique key."""

    RETURN = "return"
    REPLACE = "replace"
    RAISE = "raise"


class _Unset:
    """A value that was not given, where None means something else."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = _Unset()


@dataclass(frozen=True)
class JobOptions:
    """The options of one job; what is left out takes the handler's value, or the default.

    `run_after` is an aware datetime, or a timedelta or seconds from now; `timeout` seconds or a
    timedelta (None: no deadline); smaller `priority` runs first; `weight` is the group's share.

    Of all jobs in these tables, whatever their type and queue, one at a time holds a `unique_key`:
    while it is "live" (has not ended) or "waiting" (has not been started), or for the period
    `unique_for` (seconds or a timedelta) from its enqueue on, whatever becomes of it. Of jobs that
    come meanwhile, `on_conflict` says what is done: "return" the holder, "replace" the holder's
    arguments and options if it has not been started, or "raise" UniqueConflictError.
    """

    queue: str | None = None
    name: str | None = None
    group_key: str = ""
    weight: float = 1.0
    priority: int = DEFAULT_PRIORITY
    run_after: datetime | timedelta | float | None = None
    timeout: float | timedelta | _Unset | None = UNSET
    max_attempts: int | None = None
    parent: JobRef | None = None
    depends_on: Iterable[JobRef | Upstream] = ()
    cost: float | None = None
    meta: Mapping[str, Any] | None = None
    unique_key: str | None = None
    unique_while: str = UniqueWhile.LIVE
    unique_for: timedelta | float | None = None
    on_conflict: str = OnConflict.RETURN

    def __post_init__(self) -> None:
        for option, longest in (("queue", 64), ("group_key", 255), ("name", 255)):
            check_text(option, getattr(self, option), longest, optional=option != "group_key")
        if self.queue == "":
            raise InvalidJobError("queue must not be empty.")
        # Shares that differ by more would be lost in the rounding of virtual times.
        check_number("weight", self.weight, low=1e-3, high=1e6)
        if self.cost is not None:
            check_number("cost", self.cost, low=0, high=MOST)
        _check_integer("priority", self.priority, low=-(2**31))
        if self.max_attempts is not None:
            _check_integer("max_attempts", self.max_attempts, low=1)
        object.__setattr__(self, "depends_on", _checked_upstreams(self.depends_on))
        if self.parent is not None and not isinstance(self.parent, Node):
            id_of(self.parent)
        object.__setattr__(self, "run_after", _moment(self.run_after))
        object.__setattr__(self, "timeout", stored_timeout(self.timeout))
        if self.meta is not None:
            object.__setattr__(self, "meta", _checked_meta(self.meta))
        self._check_uniqueness()

    def _check_uniqueness(self) -> None:
        if self.unique_key is None:
            if (self.unique_for, self.unique_while, self.on_conflict) != _NOT_UNIQUE:
                raise InvalidJobError(
                    "unique_while, unique_for and on_conflict are for jobs with a unique_key."
                )
            return
        check_text("unique_key", self.unique_key, 255)
        if not self.unique_key:
            raise InvalidJobError("unique_key must not be empty; None means that there is none.")
        for option, choice in (("unique_while", UniqueWhile), ("on_conflict", OnConflict)):
            object.__setattr__(self, option, _chosen(option, getattr(self, option), choice))
        if self.unique_for is not None:
            object.__setattr__(self, "unique_for", _period(self.unique_for))
            if self.unique_while is not UniqueWhile.LIVE:
                raise InvalidJobError(
                    "unique_for holds the key for its period, whatever becomes of the job: leave "
                    "unique_while out."
                )
        if self.on_conflict is OnConflict.REPLACE and (self.depends_on or self.parent is not None):
            raise InvalidJobError(
                'on_conflict="replace" is for jobs without depends_on and parent: the holder '
                "keeps its place in its graph."
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make options of keyword arguments, naming the ones that do not exist."""
        return cls().changed(given)

    def changed(self, given: Mapping[str, Any]) -> Self:
        """Return these options with some of them set anew, refusing names that do not exist."""
        unknown = [name for name in given if name not in OPTION_NAMES]
        if unknown:
            raise InvalidJobError(
                f"Unknown job option {unknown[0]!r}; the options are {', '.join(OPTION_NAMES)}. "
                "Arguments of the handler go into handler.job(...), or the dict after the type."
            )
        return replace(self, **given)


_NOT_UNIQUE: Final = (None, UniqueWhile.LIVE, OnConflict.RETURN)

OPTION_NAMES: Final = tuple(field.name for field in fields(JobOptions))


@dataclass(frozen=True)
class JobSpec(Generic[R]):
    """A job to be enqueued: its type, its arguments as JSON values, its options."""

    type: str
    args: dict[str, Any] = field(default_factory=dict)
    chosen: JobOptions = field(default_factory=JobOptions)
    default_queue: str | None = None
    limit_key: str = ""

    def __post_init__(self) -> None:
        check_text("type", self.type, 128)
        if not self.type:
            raise InvalidJobError("A job's type must not be empty.")
        if not isinstance(self.args, dict) or not all(isinstance(key, str) for key in self.args):
            raise ArgumentsError(
                f"The arguments of {self.type!r} are a dict with the parameters' names as keys, "
                f"not {codec.printable(repr(self.args), 100)}."
            )

    def options(self, **given: Unpack[JobOptionArgs]) -> JobSpec[R]:
        """Return this job with these options set; see `JobOptions` for names and units."""
        return replace(self, chosen=self.chosen.changed(given))

    @property
    def queue(self) -> str:
        """The queue it goes to: the job's option, else its handler's, else "default"."""
        return self.chosen.queue or self.default_queue or "default"


def stored_timeout(value: Any) -> Any:
    """Return a timeout as it is stored: seconds, `NO_TIMEOUT`, or UNSET for the handler's."""
    if isinstance(value, _Unset) or value is NO_TIMEOUT:
        return value
    if value is None:
        return NO_TIMEOUT
    try:
        number = seconds(value, "timeout")
    except ConfigurationError as error:
        raise InvalidJobError(str(error)) from error
    if not 0 < number <= LONGEST:
        raise InvalidJobError(
            f"timeout must be greater than 0 seconds and at most a century, not {value!r}; None "
            "means no deadline."
        )
    return number


def _checked_upstreams(given: Any) -> tuple[Upstream, ...]:
    """Return upstreams in order, each job once; of two rules for one job, the stricter counts."""
    if isinstance(given, str | Job | Node | Upstream | int) or not isinstance(given, Iterable):
        raise InvalidJobError(f"depends_on takes a list of jobs or ids, not {given!r}.")
    found: dict[Any, Upstream] = {}
    for item in given:
        upstream = item if isinstance(item, Upstream) else Upstream(item)
        unwritten = isinstance(upstream.job, Node) and not upstream.job.written
        key = upstream.job if unwritten else id_of(upstream.job)
        if found.get(key, upstream).on_failure is not OnFailure.CANCEL or key not in found:
            found[key] = upstream
    return tuple(found.values())


def _moment(value: Any) -> datetime | timedelta | None:
    if value is None:
        return None
    try:
        if isinstance(value, datetime):
            return aware_utc(value, "run_after")
        delay = seconds(value, "run_after")
    except (ConfigurationError, OverflowError) as error:
        raise InvalidJobError(
            f"run_after takes an aware datetime, a timedelta or seconds, not {value!r}."
        ) from error
    if abs(delay) > LONGEST:
        raise InvalidJobError(f"run_after may be a century from now, not {value!r}.")
    return value if isinstance(value, timedelta) else timedelta(seconds=delay)


def _chosen(option: str, value: Any, choices: type[StrEnum]) -> StrEnum:
    try:
        return choices(value)
    except ValueError as error:
        known = " or ".join(repr(str(choice)) for choice in choices)
        raise InvalidJobError(f"{option} is {known}, not {value!r}.") from error


def _period(value: Any) -> timedelta:
    try:
        period = seconds(value, "unique_for")
    except ConfigurationError as error:
        raise InvalidJobError(str(error)) from error
    if not 0 < period <= LONGEST:
        raise InvalidJobError(
            f"unique_for must be greater than 0 seconds and at most a century, not {value!r}."
        )
    return timedelta(seconds=period)


def _checked_meta(meta: Any) -> dict[str, Any]:
    if not isinstance(meta, Mapping):
        raise InvalidJobError(f"meta takes a dict, not {meta!r}.")
    try:
        codec.check_size(codec.encode(dict(meta)), codec.MAX_BYTES)
    except ValueError as error:
        raise InvalidJobError(f"meta cannot be stored: {error}.") from error
    return dict(meta)


def check_text(option: str, value: Any, longest: int, *, optional: bool = False) -> None:
    """Raise InvalidJobError unless every database stores this text, up to `longest` characters."""
    if value is None and optional:
        return
    if not isinstance(value, str):
        raise InvalidJobError(f"{option} must be a str, not {value!r}.")
    if len(value) > longest:
        raise InvalidJobError(f"{option} may have {longest} characters; this has {len(value)}.")
    if "\x00" in value or codec.printable(value, len(value)) != value:
        raise InvalidJobError(f"{option}={value!r} has characters that databases do not store.")


def check_number(option: str, value: Any, *, low: float, high: float = float("inf")) -> None:
    """Raise InvalidJobError unless this is a finite number within these bounds."""
    if not is_finite(value) or not low <= value <= high:
        bound = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise InvalidJobError(f"{option} must be a finite number {bound}, not {value!r}.")


def _check_integer(option: str, value: Any, *, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
        raise InvalidJobError(f"{option} must be an int from {low} to {2**31 - 1}, not {value!r}.")


class JobOptionArgs(TypedDict, total=False):
    """The options of one job as keyword arguments, for type checkers; see `JobOptions`."""

    queue: str | None
    name: str | None
    group_key: str
    weight: float
    priority: int
    run_after: datetime | timedelta | float | None
    timeout: float | timedelta | None
    max_attempts: int | None
    parent: JobRef | None
    depends_on: Iterable[JobRef | Upstream]
    cost: float | None
    meta: Mapping[str, Any] | None
    unique_key: str | None
    unique_while: str
    unique_for: timedelta | float | None
    on_conflict: str

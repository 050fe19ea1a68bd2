"""What recurs: definitions of schedules, checked as they are made, and declared in code.

handlers = Handlers()

@handlers.cron("*/5 * * * *", timezone="Europe/Berlin")
async def tidy() -> None: ...

@handlers.every(timedelta(hours=1), args={"day": "today"}, catch_up="all")
@handlers.handler(timeout=60)
async def report(day: str) -> None: ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack, cast, overload
from zoneinfo import ZoneInfo

from asyncjobq import codec
from asyncjobq.cron import Cron, Every, Recurrence, interval_of
from asyncjobq.errors import ConfigurationError, HandlerError, InvalidJobError
from asyncjobq.options import NO_TIMEOUT, JobOptions, JobSpec, check_text

if TYPE_CHECKING:
    from asyncjobq.handlers import AnyHandler, Handler

F = TypeVar("F", bound=Callable[..., Any])

ONCE: Final = ("run_after", "parent", "depends_on")
"""The options of a job that make no sense for one that recurs."""


class RecurringArgs(TypedDict, total=False):
    """The options of recurring jobs as keyword arguments, for type checkers; see `JobOptions`."""

    queue: str | None
    group_key: str
    weight: float
    priority: int
    timeout: float | timedelta | None
    max_attempts: int | None
    cost: float | None
    meta: Mapping[str, Any] | None


class CatchUp(StrEnum):
    """What becomes of times that were missed, because no worker was there."""

    NONE = "none"  # nothing; a time that is met within a minute is not missed
    LATEST = "latest"  # one job, for the last of them
    ALL = "all"  # a job for each of the last thousand


@dataclass(frozen=True)
class Definition:
    """What recurs, and when: the part of a schedule that its author decides on.

    `options` are those of the jobs, as they are stored.
    """

    name: str
    type: str
    args: dict[str, Any]
    options: dict[str, Any]
    cron: str | None
    every: float | None
    timezone: str
    catch_up: CatchUp
    overlap: bool
    declared: bool
    """Whether it stands in code, and not only in the table."""

    @property
    def timing(self) -> tuple[Any, ...]:
        """What makes its times."""
        return (self.cron, self.every, self.timezone)

    def recurrence(self, anchor: datetime) -> Recurrence:
        """Return its times; intervals are counted from the anchor."""
        if self.every is not None:
            return Every(self.every, anchor)
        return Cron(cast(str, self.cron), self.timezone)

    def job(self, meta: Mapping[str, Any], added: Mapping[str, Any]) -> JobSpec[Any]:
        """Return a job of it, with more `meta`, and what is `added` where it says nothing else."""
        own = self.options.get("meta") or {}
        whole = {**added, **own, **meta}
        return JobSpec(self.type, self.args, JobOptions.of({**self.options, "meta": whole}))


FIELDS: Final = tuple(field.name for field in fields(Definition))


def define(
    name: str,
    job: JobSpec[Any],
    *,
    cron: str | None = None,
    every: float | timedelta | None = None,
    timezone: str | ZoneInfo | None = None,
    catch_up: CatchUp | str = CatchUp.LATEST,
    overlap: bool = True,
    declared: bool = False,
) -> Definition:
    """Return a definition; raises ConfigurationError or InvalidJobError saying what is wrong."""
    check_text("A schedule's name", name, 255)
    if not name:
        raise InvalidJobError("A schedule's name must not be empty.")
    if (cron is None) == (every is None):
        raise ConfigurationError(
            f"The schedule {name!r} takes one of cron= and every=: an expression such as "
            "'*/5 * * * *', or seconds or a timedelta."
        )
    if every is not None and timezone is not None:
        raise ConfigurationError("every= counts seconds, whatever the timezone; leave that out.")
    if not isinstance(overlap, bool):
        raise ConfigurationError(f"overlap must be True or False, not {overlap!r}.")
    zone = timezone.key if isinstance(timezone, ZoneInfo) else timezone
    if cron is not None:
        Cron(cron, zone or "UTC")
    return Definition(
        name=name,
        type=job.type,
        args=_as_json(job.args),
        options=_stored(name, job),
        cron=cron,
        every=None if every is None else interval_of(every),
        timezone=zone or "UTC",
        catch_up=_checked_catch_up(catch_up),
        overlap=overlap,
        declared=declared,
    )


def _checked_catch_up(given: Any) -> CatchUp:
    try:
        return CatchUp(given)
    except ValueError as error:
        known = ", ".join(repr(str(policy)) for policy in CatchUp)
        raise ConfigurationError(f"catch_up is one of {known}, not {given!r}.") from error


def _stored(name: str, job: JobSpec[Any]) -> dict[str, Any]:
    """Return the job's options as JSON values, without those that say what their default says.

    A unique key is refused: firing would wait for whatever transaction asks for it.
    """
    values = {field.name: getattr(job.chosen, field.name) for field in fields(job.chosen)}
    given: dict[str, Any] = {
        option: value.total_seconds() if isinstance(value, timedelta) else value
        for option, value in values.items()
        if value != getattr(_DEFAULTS, option)
    }
    for option in ONCE:
        if option in given:
            raise InvalidJobError(
                f"The jobs of the schedule {name!r} cannot have {option}=: they start at its times."
            )
    if "unique_key" in given:
        raise InvalidJobError(
            f"The jobs of the schedule {name!r} cannot have unique_key=: a time gives one job in "
            "any case, and overlap=False lets none start while the last has not ended."
        )
    if given.get("timeout") == NO_TIMEOUT:
        given["timeout"] = None
    stored: dict[str, Any] = _as_json({**given, "queue": job.queue})
    return stored


def _as_json(value: Any) -> Any:
    """Return a value as it comes back from the table, so that it can be compared."""
    return codec.decode(codec.encode(value))


_DEFAULTS: Final = JobOptions()


class Declarations(ABC):
    """The schedules that a registry of handlers declares."""

    def __init__(self) -> None:
        self._definitions: dict[str, Definition] = {}
        self.revision = 0
        """Goes up when a handler or a schedule is added."""

    @property
    def definitions(self) -> Mapping[str, Definition]:
        """The declared schedules by name."""
        return self._definitions

    def cron(
        self,
        expression: str,
        /,
        *,
        timezone: str | ZoneInfo | None = None,
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        catch_up: CatchUp | str = CatchUp.LATEST,
        overlap: bool = True,
        **options: Unpack[RecurringArgs],
    ) -> Declaration:
        """Run the decorated function, or handler, at the times of a cron expression.

        Five fields, or six with seconds first, in UTC unless a time zone is named. The schedule
        takes the handler's name unless one is given; `args` and `options` are those of its jobs.
        """
        timing = {"cron": expression, "timezone": timezone}
        how = {**timing, "name": name, "catch_up": catch_up, "overlap": overlap}
        return Declaration(self, how, args or {}, options)

    def every(
        self,
        interval: float | timedelta,
        /,
        *,
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        catch_up: CatchUp | str = CatchUp.LATEST,
        overlap: bool = True,
        **options: Unpack[RecurringArgs],
    ) -> Declaration:
        """Run the decorated function, or handler, at an interval in seconds or a timedelta.

        It is counted from the schedule's first declaration, and keeps its phase for ever.
        """
        how = {"every": interval, "name": name, "catch_up": catch_up, "overlap": overlap}
        return Declaration(self, how, args or {}, options)

    @abstractmethod
    def _handler_of(self, given: Any) -> AnyHandler:
        """Return the handler that is meant, registered here."""

    def declare(
        self, given: Any, how: Mapping[str, Any], args: Mapping[str, Any], options: Any
    ) -> AnyHandler:
        """Declare a schedule of a function or handler, and return the handler."""
        handler = self._handler_of(given)
        queue = handler.options.queue
        job = JobSpec[Any](handler.type, handler.encode(args), default_queue=queue)
        name = how["name"] or handler.type
        self._define(define(**{**how, "name": name}, job=job.options(**options), declared=True))
        return handler

    def _define(self, definition: Definition) -> None:
        if self._definitions.get(definition.name, definition) is not definition:
            raise HandlerError(
                f"The schedule {definition.name!r} is declared twice. Give one another name: "
                'cron("0 4 * * *", name="...").'
            )
        if definition.name not in self._definitions:
            self._definitions[definition.name] = definition
            self.revision += 1


class Declaration:
    """A decorator that declares a schedule of a function, which it registers, or of a handler."""

    def __init__(
        self,
        registry: Declarations,
        how: Mapping[str, Any],
        args: Mapping[str, Any],
        options: Any,
    ) -> None:
        self._declare = registry.declare
        self._given = (how, args, options)

    @overload
    def __call__(self, given: Handler[F], /) -> Handler[F]: ...
    @overload
    def __call__(self, given: F, /) -> Handler[F]: ...
    def __call__(self, given: Any, /) -> Any:
        return self._declare(given, *self._given)

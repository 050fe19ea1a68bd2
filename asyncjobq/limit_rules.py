"""Which limits hold for which jobs, and the key under which a job counts towards them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from asyncjobq import codec
from asyncjobq.errors import ConfigurationError
from asyncjobq.handlers import AnyHandler, Handlers
from asyncjobq.limits import GROUP, Limit, check_fits, joined, parted

Place = tuple[str, str]
"""A limit's name and a value of its key."""


class Placed(Protocol):
    """A lane, or a job in one."""

    @property
    def queue(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def limit_key(self) -> str: ...
    @property
    def group_key(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Use:
    """A limit that holds for a job, and the value of its key ("" where it has none)."""

    limit: Limit
    value: str

    @property
    def place(self) -> Place:
        """What names the limit's row."""
        return self.limit.name, self.value


class LimitRules:
    """The limits of a scheduler and of its handlers."""

    def __init__(self, limits: Iterable[Limit], handlers: Handlers) -> None:
        self._general = tuple(limits)
        self._handlers = handlers
        self.revision = handlers.revision
        """That of the registry when this was made."""
        self._found: dict[tuple[str, str], tuple[Limit, ...]] = {}
        self.by_name  # noqa: B018  refuses two limits of one name

    @cached_property
    def by_name(self) -> dict[str, Limit]:
        """All limits by name; raises ConfigurationError for two different ones of one name."""
        found: dict[str, Limit] = {}
        own = (limit for handler in self._handlers for limit in handler.options.limits)
        for limit in (*self._general, *own):
            if not isinstance(limit, Limit):
                raise ConfigurationError(
                    f"limits takes Concurrency, RateLimit, Budget or Capacity, not {limit!r}."
                )
            if found.setdefault(limit.name, limit) != limit:
                raise ConfigurationError(
                    f"There are two different limits named {limit.name!r}: {found[limit.name]!r} "
                    f"and {limit!r}. Give one another name, or make them the same."
                )
        return found

    def of(self, queue: str, type_name: str) -> tuple[Limit, ...]:
        """Return the limits that hold for the jobs of this type in this queue."""
        known = self._found.get((queue, type_name))
        if known is None:
            known = self._found[queue, type_name] = self._of(queue, type_name)
        return known

    def uses(self, job: Placed) -> tuple[Use, ...]:
        """Return the limits that hold for a job, each with the value of its key."""
        limits = self.of(job.queue, job.type)
        if not limits:
            return ()
        values = parted(job.limit_key)
        return tuple(Use(limit, _value(limit, job, values)) for limit in limits)

    def handler_of(self, type_name: str) -> AnyHandler | None:
        """Return the handler of a type, if it is known here."""
        return self._handlers.find(type_name)

    def cost_of(self, type_name: str) -> float:
        """Return what the jobs of a type cost that do not say so themselves."""
        handler = self._handlers.find(type_name)
        return 1.0 if handler is None else handler.options.cost

    def key_of(self, queue: str, type_name: str, args: Mapping[str, Any]) -> str:
        """Return what a job's `limit_key` is to be."""
        limits = self.of(queue, type_name)
        if not any(limit.argument for limit in limits):
            return ""
        handler = self._handlers[type_name]
        names = {limit.argument for limit in limits if limit.argument is not None}
        return joined({name: handler.argument_as_text(name, args) for name in names})

    def stored_key_of(self, queue: str, type_name: str, args: str) -> str:
        """Return what a job's `limit_key` is to be whose arguments are at hand as JSON text."""
        try:
            return self.key_of(queue, type_name, codec.decode(args))
        except (ValueError, AttributeError):  # it fails when it is run, and says why
            names = [limit.argument for limit in self.of(queue, type_name) if limit.argument]
            return joined(dict.fromkeys(names, ""))

    def has_keys_of(self, job: Placed) -> bool:
        """Tell whether a job's `limit_key` names the arguments that its limits are keyed by."""
        limits = self.of(job.queue, job.type)
        return parted(job.limit_key).keys() == {
            limit.argument for limit in limits if limit.argument is not None
        }

    def _of(self, queue: str, type_name: str) -> tuple[Limit, ...]:
        handler: AnyHandler | None = self._handlers.find(type_name)
        own = handler.options.limits if handler is not None else ()
        both: tuple[Limit, ...] = tuple(dict.fromkeys((*self._general, *own)))
        found = tuple(limit for limit in both if limit.queue in (None, queue))
        check_fits(f"{type_name!r}", {limit.argument for limit in found if limit.argument})
        return found


def _value(limit: Limit, job: Placed, values: Mapping[str, str]) -> str:
    if limit.key is None:
        return ""
    return job.group_key if limit.key == GROUP else values.get(limit.key, "")

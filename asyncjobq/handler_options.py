"""How the jobs of a handler run, unless they say otherwise: the options of its registration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from asyncjobq.backoff import RetryPolicy, RetryRules, exponential
from asyncjobq.errors import AsyncJobQError, HandlerError
from asyncjobq.limits import Limit
from asyncjobq.options import UNSET, JobOptions

PLACES: Final = (None, "thread", "process")


@dataclass(frozen=True)
class HandlerOptions:
    """How the jobs of a handler run, unless a job's own options say otherwise.

    `timeout` is seconds or a timedelta (None: no deadline; left out: the scheduler's default).
    `retry`, `retry_on` and `fail_on`: see `RetryRules`; timeouts are retried unless `fail_on` names
    TimeoutError, and what the handler raises to end its attempt comes before all rules. `aliases`
    are further types that this handler runs, e.g. its name in earlier releases. With
    `run_in="process"` a `def` runs in a process that can be killed; "thread" is what it gets else.
    """

    timeout: Any = UNSET
    max_attempts: int = 5
    retry: RetryPolicy = field(default_factory=exponential)
    retry_on: Any = None
    fail_on: Any = ()
    queue: str | None = None
    limits: tuple[Limit, ...] = ()
    cost: float = 1.0
    aliases: tuple[str, ...] = ()
    run_in: str | None = None
    rules: RetryRules = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_attempts is None:
            raise HandlerError("max_attempts must be an int of at least 1, not None.")
        if self.cost is None:
            raise HandlerError("cost must be a number of at least 0, not None.")
        if self.run_in not in PLACES:
            raise HandlerError(f"run_in is 'thread' or 'process', not {self.run_in!r}.")
        rules = RetryRules(self.retry, self.retry_on, self.fail_on)
        object.__setattr__(self, "rules", rules)
        try:
            checked = JobOptions(
                timeout=self.timeout,
                max_attempts=self.max_attempts,
                queue=self.queue,
                cost=self.cost,
            )
        except AsyncJobQError as error:
            raise HandlerError(str(error)) from error
        object.__setattr__(self, "timeout", checked.timeout)
        object.__setattr__(self, "limits", _tuple_of("limits", self.limits))
        object.__setattr__(self, "aliases", _tuple_of("aliases", self.aliases))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make options of keyword arguments, naming the ones that do not exist."""
        for name in given:
            if name not in OPTION_NAMES:
                options = ", ".join(OPTION_NAMES)
                raise HandlerError(f"Unknown handler option {name!r}; the options are {options}.")
        return cls(**given)


OPTION_NAMES: Final = tuple(field.name for field in fields(HandlerOptions) if field.init)


def _tuple_of(option: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise HandlerError(f"{option} takes a tuple, not {value!r}.")
    return tuple(value)

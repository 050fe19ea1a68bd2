"""How long to wait before trying again: for jobs (retry policies and rules) and for outages."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from asyncjobq import clock
from asyncjobq.ends import AttemptEnd
from asyncjobq.errors import ConfigurationError, HandlerError

RetryPolicy = Callable[[int, BaseException], "float | timedelta | None"]
"""Takes the number of the attempt that failed (from 1) and its error; returns the delay in
seconds or as a timedelta, or None to give up."""


def delay_of(attempt: int, *, base: float, factor: float, cap: float) -> float:
    """Return `base * factor ** (attempt - 1)`, at most `cap`, for any attempt number."""
    try:
        return min(cap, base * float(factor) ** max(0, attempt - 1))
    except OverflowError:
        return cap if base else 0.0


def exponential(
    base: float | timedelta = 1.0,
    factor: float = 2.0,
    cap: float | timedelta = 3600.0,
    jitter: float = 0.1,
) -> RetryPolicy:
    """Wait `base` seconds after the first failure and `factor` times as long after each further.

    `jitter` is the share of the delay that is random, so that jobs that failed together do not
    come back together.
    """
    first, longest = _delay("base", base), _delay("cap", cap)
    _check_between("factor", factor, 1.0)
    _check_between("jitter", jitter, 0.0, 1.0)

    def policy(attempt: int, _error: BaseException) -> float:
        delay = delay_of(attempt, base=first, factor=factor, cap=longest)
        return delay * (1 - jitter * random.random())

    return policy


def constant(seconds: float | timedelta) -> RetryPolicy:
    """Wait the same time after each failure."""
    delay = _delay("constant()", seconds)
    return lambda attempt, error: delay


def none() -> RetryPolicy:
    """Never retry: the first failure is final."""
    return lambda attempt, error: None


_FACTORIES: Final[tuple[object, ...]] = (exponential, constant, none)

ErrorTypes = type[BaseException] | Iterable[type[BaseException]]


@dataclass(frozen=True)
class RetryRules:
    """Which failures of a handler are retried, and when; raises HandlerError for bad ones.

    `fail_on` names the exceptions that are final; `retry_on`, if given, the only ones that are
    retried; of what is left, `policy` decides. An exception group counts by its members: one of
    them in `fail_on` is enough, all have to be in `retry_on`.
    """

    policy: Any = field(default_factory=exponential)
    retry_on: Any = None
    fail_on: Any = ()

    def __post_init__(self) -> None:
        _check_policy(self.policy)
        fail_on = _types("fail_on", self.fail_on)
        object.__setattr__(self, "fail_on", fail_on)
        if self.retry_on is None:
            return
        retry_on = _types("retry_on", self.retry_on)
        object.__setattr__(self, "retry_on", retry_on)
        if not retry_on:
            raise HandlerError("retry_on=() would retry nothing; say retry=none() for that.")
        for kind in retry_on:
            if issubclass(kind, fail_on):
                raise HandlerError(
                    f"retry_on has {kind.__name__}, but fail_on covers it: it is never retried."
                )

    def allow(self, error: BaseException) -> bool:
        """Tell whether an attempt that raised this may be repeated."""
        if _matches(error, self.fail_on, any):
            return False
        return self.retry_on is None or _matches(error, self.retry_on, all)

    @property
    def allow_timeouts(self) -> bool:
        """Whether a job that ran out of time may be repeated: not if `fail_on` names TimeoutError.

        What is above that in the hierarchy, as OSError is, does not mean a job's own deadline.
        """
        return TimeoutError not in self.fail_on


def outage_delays(base: float = 0.1, cap: float = 10.0) -> Iterator[float]:
    """Yield growing delays in seconds, each between half and the whole of its step."""
    attempt = 0
    while True:
        attempt += 1
        yield delay_of(attempt, base=base, factor=2.0, cap=cap) * random.uniform(0.5, 1.0)


def _delay(name: str, given: Any) -> float:
    try:
        number = clock.seconds(given, name)
    except ConfigurationError as error:
        raise HandlerError(str(error)) from error
    if number < 0:
        raise HandlerError(f"{name} must not be negative, and is {given!r}.")
    return number


def _check_between(name: str, given: Any, low: float, high: float | None = None) -> None:
    if not clock.is_finite(given) or given < low or (high is not None and given > high):
        bound = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise HandlerError(f"{name} must be a number {bound}, not {given!r}.")


def _check_policy(policy: Any) -> None:
    if not callable(policy) or policy in _FACTORIES:
        raise HandlerError(f"retry takes a policy such as exponential(), not {policy!r}.")
    if inspect.iscoroutinefunction(policy):
        raise HandlerError(f"retry takes a plain function, but {policy!r} is asynchronous.")
    try:
        inspect.signature(policy).bind(1, Exception())
    except ValueError:  # a callable that hides its signature
        return
    except TypeError as error:
        raise HandlerError(
            f"retry takes a function of the attempt's number and its error; {policy!r} cannot be "
            f"called so: {error}."
        ) from error


def _types(option: str, given: Any) -> tuple[type[BaseException], ...]:
    checked: tuple[Any, ...] = (given,)
    if isinstance(given, Iterable) and not isinstance(given, type):
        checked = tuple(given)
    for kind in checked:
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise HandlerError(f"{option} takes types of exceptions, not {kind!r}.")
        if issubclass(kind, AttemptEnd):
            raise HandlerError(
                f"{option} has {kind.__name__}, but what a handler raises to end its attempt "
                "decides by itself, whatever the rules say."
            )
    return checked


def _matches(
    error: BaseException,
    types: tuple[type[BaseException], ...],
    of_members: Callable[[Iterable[bool]], bool],
) -> bool:
    if isinstance(error, types):
        return True
    if not isinstance(error, BaseExceptionGroup):
        return False
    return of_members(_matches(member, types, of_members) for member in error.exceptions)

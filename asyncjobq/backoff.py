"""How long to wait before trying again: for jobs (retry policies) and for outages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

RetryPolicy = Callable[[int, BaseException], "float | None"]
"""Takes the number of the attempt that failed (from 1) and its error; returns the delay in
seconds, or None to give up."""


def delay_of(attempt: int, *, base: float, factor: float, cap: float) -> float:
    """Return `base * factor ** (attempt - 1)`, at most `cap`, for any attempt number."""
    try:
        return min(cap, base * factor ** max(0, attempt - 1))
    except OverflowError:
        return cap


def exponential(
    base: float = 1.0, factor: float = 2.0, cap: float = 3600.0, jitter: float = 0.1
) -> RetryPolicy:
    """Wait `base` seconds after the first failure and `factor` times as long after each further.

    `jitter` is the share of the delay that is random, so that jobs that failed together do not
    come back together.
    """

    def policy(attempt: int, _error: BaseException) -> float:
        delay = delay_of(attempt, base=base, factor=factor, cap=cap)
        return delay * (1 - jitter * random.random())

    return policy


def constant(seconds: float) -> RetryPolicy:
    """Wait the same time after each failure."""
    return lambda attempt, error: seconds


def none() -> RetryPolicy:
    """Never retry: the first failure is final."""
    return lambda attempt, error: None


def outage_delays(base: float = 0.1, cap: float = 10.0) -> Iterator[float]:
    """Yield growing delays in seconds, each between half and the whole of its step."""
    attempt = 0
    while True:
        attempt += 1
        yield delay_of(attempt, base=base, factor=2.0, cap=cap) * random.uniform(0.5, 1.0)

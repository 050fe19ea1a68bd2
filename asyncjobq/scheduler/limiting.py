"""What people change of limits and weights while jobs run, through the scheduler."""

from __future__ import annotations

from datetime import timedelta

from asyncjobq.callers import AsyncCaller
from asyncjobq.clock import seconds
from asyncjobq.errors import ConfigurationError
from asyncjobq.job import JobRef, id_of
from asyncjobq.limit_control import (
    checked_change,
    clear_limit,
    set_limit,
    set_weight,
)
from asyncjobq.limit_states import MOST, LimitState, limit_states, limits_of_job
from asyncjobq.options import JobOptions
from asyncjobq.scheduler.enqueuing import Enqueuing
from asyncjobq.statistics import Stats, read_stats


def positive(name: str, value: int) -> int:
    """Return the number; raises ConfigurationError for what is none of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be an int of at least 1, not {value!r}.")
    return value


class Limiting(Enqueuing):
    """Changes limits and the weights of groups, and says how they are used."""

    async def set_limit(
        self,
        name: str,
        amount: float,
        /,
        *,
        per: float | timedelta | None = None,
        burst: int | None = None,
        session: AsyncCaller | None = None,
    ) -> None:
        """Give a limit other numbers than the code does, for all workers, until it is cleared.

        It holds from the next claim of each worker on, for all values of its key. What is left out
        stays as in the code.
        """
        if not isinstance(name, str) or not 1 <= len(name) <= 64:
            raise ConfigurationError(
                f"A limit's name is a str of 1 to 64 characters, not {name!r}."
            )
        period = None if per is None else seconds(per, "per")
        checked_change(self._limit_rules().by_name.get(name), name, amount, period, burst)
        await self._write(
            lambda c, b: set_limit(c, b, name, amount=amount, per=period, burst=burst), session
        )

    async def clear_limit(self, name: str, /, *, session: AsyncCaller | None = None) -> None:
        """Let a limit have the numbers of the code again."""
        await self._write(lambda c, b: clear_limit(c, b, name), session)

    async def limits(
        self,
        job: JobRef | None = None,
        /,
        *,
        most: int = MOST,
        session: AsyncCaller | None = None,
    ) -> list[LimitState]:
        """Return the limits that were used or that jobs wait for, by name and value of the key.

        At most so many; and so many ready jobs are counted for them. With a `job`, those that it
        has: the ones that are `full` keep it from starting now. Raises JobNotFoundError.
        """
        rules = self._limit_rules()
        if job is not None:
            job_id = id_of(job)
            return await self._read(lambda c, b: limits_of_job(c, b, job_id, rules), session)
        count = positive("most", most)
        return await self._read(lambda c, b: limit_states(c, b, rules, count), session)

    async def stats(self, *, most: int = MOST, session: AsyncCaller | None = None) -> Stats:
        """Count the jobs by queue, type and state, and say how the limits are used.

        About `most` jobs of a kind are looked at, however many there are: see `Stats.whole`.
        """
        rules, count = self._limit_rules(), positive("most", most)
        return await self._read(lambda c, b: read_stats(c, b, rules, count), session)

    async def set_weight(
        self, group_key: str, weight: float | None, /, *, session: AsyncCaller | None = None
    ) -> None:
        """Set the weight of a group, also for what is queued; None: as its jobs say again."""
        JobOptions(group_key=group_key, weight=1.0 if weight is None else weight)
        await self._write(lambda c, b: set_weight(c, b, group_key, weight), session)

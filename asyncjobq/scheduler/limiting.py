"""What people change of limits and weights while jobs run, through the scheduler."""

from __future__ import annotations

from datetime import timedelta

from asyncjobq.callers import AsyncCaller
from asyncjobq.clock import seconds
from asyncjobq.errors import ConfigurationError
from asyncjobq.limit_control import (
    LimitState,
    checked_change,
    clear_limit,
    limit_states,
    set_limit,
    set_weight,
)
from asyncjobq.options import JobOptions
from asyncjobq.scheduler.enqueuing import Enqueuing


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

    async def limits(self, *, session: AsyncCaller | None = None) -> list[LimitState]:
        """Return the limits that were used or that jobs wait for, by name and value of the key."""
        rules = self._limit_rules()
        return await self._read(lambda c, b: limit_states(c, b, rules), session)

    async def set_weight(
        self, group_key: str, weight: float | None, /, *, session: AsyncCaller | None = None
    ) -> None:
        """Set the weight of a group, also for what is queued; None: as its jobs say again."""
        JobOptions(group_key=group_key, weight=1.0 if weight is None else weight)
        await self._write(lambda c, b: set_weight(c, b, group_key, weight), session)

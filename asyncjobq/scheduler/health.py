"""Whether the tables are as they must be, and mending what is not."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.check import Checking, CheckReport
from asyncjobq.check_repair import CHUNK, Broken, Mended, RepairReport, mend_once
from asyncjobq.clock import monotonic, seconds
from asyncjobq.emitter import Told
from asyncjobq.enqueue import TOPIC
from asyncjobq.errors import ConfigurationError
from asyncjobq.lease import reclaim_once
from asyncjobq.options import LONGEST
from asyncjobq.outbox import Outbox
from asyncjobq.scheduler.enqueuing import Enqueuing
from asyncjobq.settings import Duration
from asyncjobq.settle import Sweep
from asyncjobq.transition import End, Return

ROUNDS: Final = 3
"""What is mended may turn out to break another rule."""


class Health(Enqueuing):
    """Checks the tables."""

    async def check(
        self, *, examples: int = 10, grace: Duration = 60.0, timeout: Duration = 300.0
    ) -> CheckReport:
        """Look for rows that break a rule of the tables; changes nothing.

        What a worker's next tick puts right (a lease that ran out, a job that is due, what has not
        been settled) counts only when it is older than `grace`: it has to be longer than a poll
        interval, and says so too where no worker runs. Costs what is open, and one reading of the
        tables in slices; rules that were not finished within `timeout` are named in the report.
        Which limits are kept can only be told of those that this scheduler and its handlers have.
        """
        shown = _at_least_none(examples)
        return (await self._checking(grace, timeout)).report(shown)

    async def repair(
        self, *, examples: int = 10, grace: Duration = 60.0, timeout: Duration = 300.0
    ) -> RepairReport:
        """Check, mend what can be mended, and check again; may be called while workers run.

        Each fix is what the library would have done: see `Finding.mending`. Jobs that a worker
        holds are left alone, and so is what another transaction has locked.
        """
        shown = _at_least_none(examples)
        first = now = await self._checking(grace, timeout)
        for _ in range(ROUNDS):
            if not any(rule.mending for rule in now.rules if now.found.get(rule.name)):
                break
            await self._mend(now, monotonic() + seconds(timeout, "timeout"))
            now = await self._checking(grace, timeout)
        mended = tuple(
            Mended(rule.name, count, rule.mending)
            for rule in first.rules
            if rule.mending is not None
            and rule.name not in now.unfinished
            and (count := len({*first.found.get(rule.name, ())} - {*now.found.get(rule.name, ())}))
        )
        return RepairReport(first.report(shown), mended, now.report(shown))

    async def _checking(self, grace: Duration, timeout: Duration) -> Checking:
        await self.check_database()
        longest = _not_negative(timeout, "timeout")
        rules = self._limit_rules()
        checking = Checking(self._database.backend, rules, _not_negative(grace, "grace"))
        async with self._schema_blamed():
            await checking.run(self._database, longest)
        return checking

    async def _mend(self, checking: Checking, deadline: float) -> None:
        for rule in checking.rules:
            for keys in chunked(checking.found.get(rule.name, ()), CHUNK):

                def mend(connection: Connection, backend: Backend) -> None:
                    mend_once(Broken(connection, backend, rule, checking.grace, keys))  # noqa: B023
                    backend.notify(connection, TOPIC)

                await self._write(mend, None)
        # Where much is going on, there is always more; that is the workers' business.
        while await self._reclaim() and monotonic() < deadline:
            pass
        outbox, sweep = Outbox(self._database, self._emitter), Sweep()
        while not sweep.over and monotonic() < deadline:
            await outbox.sweep(sweep)

    async def _reclaim(self) -> bool:
        def reclaim(connection: Connection, backend: Backend) -> tuple[list[End | Return], Told]:
            taken = reclaim_once(connection, backend)
            ids = [item.row.id for item in taken]
            return taken, self._emitter.look_up(connection, backend, ids)

        taken, told = await self._write(reclaim, None)
        self._emitter.reclaimed(taken, told)
        return bool(taken)


def _not_negative(value: Duration, name: str) -> float:
    number = seconds(value, name)
    if number < 0:
        raise ConfigurationError(f"{name} must not be negative: {value!r}.")
    return min(number, LONGEST)


def _at_least_none(examples: int) -> int:
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 0:
        raise ConfigurationError(f"examples must be an int of at least 0, not {examples!r}.")
    return examples

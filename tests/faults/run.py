"""One run: workers, a producer, and the faults of a schedule, over one database."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sqlalchemy import make_url, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from asyncjobq import AsyncJobQError, CheckReport, Concurrency, JobRow, Scheduler
from asyncjobq.states import TERMINAL
from cases.log import Log
from faults.injector import Injector
from faults.judge import Judge, entries_of, note_ends, read_tables
from faults.load import Load
from faults.program import CRANES
from faults.proxy import Proxy
from faults.schedule import CONNECTIONS, FILE, PROCESSES, SERVER, Fault, Kind, faults_of
from faults.slots import SLOTS, Slots
from throwaway import ServerProcess

END_SECONDS: Final = 120.0
"""Seconds after the last fault in which every job has to have ended."""
CHECK_EVERY: Final = 15.0
GRACE: Final = 60.0


@dataclass
class Run:
    """A run and its figures."""

    url: str
    folder: Path
    seed: int
    seconds: float
    server: ServerProcess | None = None
    """The server, if it may be restarted."""
    clean_only: bool = False
    """Whether it must only be restarted in good order."""
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.database = make_url(self.url)
        self.is_file = self.database.get_backend_name() == "sqlite"
        self.log = Log(self.folder / "handlers.log")
        self._over = False

    @property
    def faults(self) -> list[Fault]:
        """The schedule of this run: that of its seed, as far as it can happen here."""
        plans = dict(PROCESSES) | (FILE if self.is_file else CONNECTIONS)
        if self.server is not None:
            plans |= SERVER
        if self.clean_only:
            plans.pop(Kind.KILL_SERVER, None)
        return faults_of(self.seed, self.seconds, plans, SLOTS)

    async def go(self) -> None:
        """Run, and judge; what is wrong is in `problems`."""
        async with AsyncExitStack() as stack:
            await self._prepare(stack)
            over = asyncio.Event()
            background = [
                asyncio.create_task(self.slots.keep_full()),
                asyncio.create_task(self._check_now_and_then()),
            ]
            producing = asyncio.create_task(self.load.run(over))
            try:
                await self.injector.run(self.faults, self.seconds)
                over.set()
                await producing
                await self._let_end()
            finally:
                self._over = True
                self.slots.close()
                producing.cancel()
                await asyncio.gather(*background, producing, return_exceptions=True)
                self.slots.close()  # one may have been started meanwhile
            for task in background:
                task.result()
            await self._judge()

    async def _prepare(self, stack: AsyncExitStack) -> None:
        stack.callback(self.log.close)
        self.engine: AsyncEngine = create_async_engine(self.url, pool_pre_ping=True)
        stack.push_async_callback(self.engine.dispose)
        self.observer = await stack.enter_async_context(
            Scheduler(self.url, limits=[Concurrency("cranes", CRANES)])
        )
        await self.observer.create_schema()
        async with self.engine.begin() as connection:
            await connection.run_sync(note_ends)
        workers, producer = [await stack.enter_async_context(self._proxy()) for _ in range(2)]
        through = await stack.enter_async_context(Scheduler(self._through(producer)))
        self.load = Load(through, self.engine, random.Random(f"{self.seed} load"))
        draw = random.Random(f"{self.seed} workers")
        # Where the database is a file, its clock would be wrong too.
        self.slots = Slots(
            self._through(workers), self.log.path, self.folder, draw, skewed=not self.is_file
        )
        self.injector = Injector(self.database, self.slots, (workers, producer), self.server)

    @asynccontextmanager
    async def _proxy(self) -> AsyncIterator[Proxy | None]:
        if self.is_file:
            yield None
            return
        proxy = Proxy(self.database.host or "127.0.0.1", self.database.port or 0)
        await proxy.start()
        yield proxy
        await proxy.close()

    def _through(self, proxy: Proxy | None) -> str:
        if proxy is None:
            return self.url
        url = self.database.set(host="127.0.0.1", port=proxy.port)
        return url.render_as_string(hide_password=False)

    # -- the end --------------------------------------------------------------------------------

    async def _check_now_and_then(self) -> None:
        """Look for rows that break a rule while all this happens: there must never be one."""
        while not self._over:
            for _ in range(int(CHECK_EVERY / 0.1)):
                await asyncio.sleep(0 if self._over else 0.1)
            with suppress(AsyncJobQError, DBAPIError, OSError):
                self._note_findings(await self.observer.check(grace=GRACE), "while running")

    def _note_findings(self, report: CheckReport, when: str) -> None:
        self.problems += [f"{when}: {finding}" for finding in report.findings]
        if report.unfinished:
            self.problems.append(f"{when}: not checked: {report.unfinished}")
        self.figures["checks"] = self.figures.get("checks", 0) + 1

    async def _let_end(self) -> None:
        """Wait for the end of every job, and of a fresh one, now that nothing is in the way."""
        begun = time.monotonic()
        await self.load.add_fresh()
        query = select(JobRow.id).where(JobRow.state.not_in(sorted(TERMINAL))).limit(1)
        while time.monotonic() < begun + END_SECONDS:
            with suppress(DBAPIError, OSError):
                async with self.engine.connect() as connection:
                    if (await connection.execute(query)).first() is None:
                        break
            await asyncio.sleep(0.1)
        self.figures["seconds to the last end"] = round(time.monotonic() - begun, 1)
        # What has ended last may not be settled yet.
        while not (report := await self.observer.check(grace=0.5)).clean:
            if time.monotonic() > begun + END_SECONDS:
                break
            await asyncio.sleep(0.2)
        self._note_findings(report, "at the end")

    async def _judge(self) -> None:
        async with self.engine.connect() as connection:
            tables = await connection.run_sync(read_tables)
        load = self.load
        entries = entries_of(self.log)
        judge = Judge(tables, load.expected, load.answers, load.retried, entries)
        self.problems += [*judge.faults(), *self.slots.problems, *self.slots.surprises()]
        self.figures |= {
            "jobs": len(tables.jobs),
            "by state": dict(Counter(row.state for row in tables.jobs.values())),
            "starts of handlers": judge.starts,
            "jobs opened again by retry": judge.reopened,
            "jobs run more than once": judge.run_twice,
            "attempts recovered from lost leases": tables.lost_leases,
            "workers": len(self.slots.workers),
            "workers crashed by their jobs": self.slots.crashes,
            "calls repeated": self.load.repeated,
            "calls looked up": self.load.unknown,
        }

    def summary(self) -> str:
        """Return the figures, a line each."""
        lines = [f"{name}: {count}" for name, count in sorted(self.injector.done.items())]
        lines += [f"{name}: {value}" for name, value in self.figures.items()]
        lines.append(f"problems: {len(self.problems)}")
        lines += self.problems[:40]
        return "\n".join(lines)

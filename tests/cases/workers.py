"""Starts worker processes and watches what they do."""

from __future__ import annotations

import asyncio
import inspect
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from asyncjobq import Job, JobRow, JobSpec, Scheduler
from asyncjobq.states import TERMINAL
from cases import worker_program
from cases.log import Log
from cases.worker_program import Settings

MakeEngine = Callable[..., AsyncEngine]

LEASE: Final = Settings.lease_ttl
POLL: Final = Settings.poll_interval
SLACK: Final = 5.0
"""Seconds by which a busy machine may be late."""
FULL: Final = bool(os.environ.get("ASYNCJOBQ_TEST_FULL"))
"""Whether scenarios run at full length, and not shortened for everyday use."""

SURPRISES: Final = (" loop met ", " ERROR asyncio ", "Fatal Python error", "never retrieved")
"""What a process logs when something went wrong that nobody had thought of."""

_TESTS: Final = Path(__file__).parents[1]
forks: Final = multiprocessing.get_context("forkserver")
"""Makes processes that have done their imports."""


def prepare_forks() -> None:
    """Start the process from which workers are forked: much faster than a new interpreter."""
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS), *([known] if known else [])])
    try:
        forks.set_forkserver_preload([worker_program.__name__, "aiosqlite", "asyncpg", "aiomysql"])
        first = forks.Process(target=time.sleep, args=(0,))
        first.start()
        first.join()
        first.close()
    finally:
        if known is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = known


async def wait_until(condition: Callable[[], Any], within: float, what: str) -> Any:
    """Return the condition's value, or its awaited one, once it is true; fails after a time."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        await asyncio.sleep(0.01)


class WorkerProcess:
    """One worker in a process of its own.

    With `environment`, variables to be added that work only from a program's start, it is a new
    interpreter; else it is forked from one that has done its imports. `program` is the module whose
    `run` is called with the settings.
    """

    def __init__(
        self,
        settings: Any,
        output: Path,
        environment: Mapping[str, str] | None = None,
        program: ModuleType = worker_program,
    ) -> None:
        self.settings = settings
        self.id = settings.worker_id
        self._output = output
        self._forked: Any = None
        self._executed: subprocess.Popen[bytes] | None = None
        if environment is None:
            given = (program.run, settings, str(output))
            self._forked = forks.Process(target=_run_forked, args=given)
            self._forked.start()
            self.pid: int = self._forked.pid
        else:
            self._executed = _execute(program, settings, output, environment)
            self.pid = self._executed.pid

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it lives."""
        if self._executed is not None:
            return self._executed.poll()
        code: int | None = self._forked.exitcode
        return code

    async def exited(self, within: float) -> int:
        """Wait for the process's end and return its exit code."""
        await wait_until(lambda: self.exit_code is not None, within, f"worker {self.id} exits")
        assert self.exit_code is not None
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def freeze(self) -> None:
        """Stop the process with SIGSTOP, and wait until it has stopped."""
        self.send(signal.SIGSTOP)
        while self._stat()[0] not in "TZ":  # it may just have ended by itself
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let a frozen process go on."""
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with -9, and wait for its end."""
        if self.exit_code is None:
            self.send(signal.SIGKILL)
        if self._executed is not None:
            self._executed.wait()
        else:
            self._forked.join()

    def output(self) -> str:
        """Return what the process has logged."""
        return self._output.read_text() if self._output.exists() else ""

    def surprises(self) -> bool:
        """Tell whether the process met errors that the library did not expect."""
        return any(sign in self.output() for sign in SURPRISES)

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used."""
        fields = self._stat()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _stat(self) -> list[str]:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()


def _run_forked(run: Callable[[Any], None], settings: Any, output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run(settings)


def _execute(
    program: ModuleType, settings: Any, output: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    paths = [str(_TESTS), os.environ.get("PYTHONPATH", "")]
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", program.__name__, json.dumps(asdict(settings))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


@dataclass
class Case:
    """One scenario: a database, a producer, the log, and the workers that were started."""

    url: str
    folder: Path
    scheduler: Scheduler
    """Enqueues and asks; it runs nothing."""
    engine: AsyncEngine
    """For the test's own SQL."""
    log: Log
    workers: list[WorkerProcess] = field(default_factory=list)

    def start_worker(
        self, worker_id: str = "A", *, environment: Mapping[str, str] | None = None, **changes: Any
    ) -> WorkerProcess:
        """Start a worker; `changes` are further settings."""
        settings = Settings(self.url, str(self.log.path), worker_id, **changes)
        output = self.folder / f"worker-{len(self.workers)}-{worker_id}.log"
        worker = WorkerProcess(settings, output, environment)
        self.workers.append(worker)
        return worker

    async def up(self, *workers: WorkerProcess) -> None:
        """Wait until workers serve."""
        for worker in workers:
            came_up = partial(self.log.entries, "up", pid=worker.pid)
            await wait_until(came_up, 20.0, f"worker {worker.id} serves")

    async def add(self, label: str, type_: str = "work", **options: Any) -> Job[Any]:
        """Enqueue one job; `seconds` and `key` go to its handler, the rest are its options."""
        args: dict[str, Any] = {"label": label}
        args |= {name: options.pop(name) for name in ("seconds", "key") if name in options}
        return await self.scheduler.enqueue(type_, args, **options)

    async def add_many(self, names: Iterable[str], **options: Any) -> list[Job[Any]]:
        """Enqueue `work` for each label in one transaction."""
        args = {"seconds": options.pop("seconds", 0.0)}
        specs = [JobSpec[Any]("work", {"label": name, **args}) for name in names]
        return await self.scheduler.enqueue_many([spec.options(**options) for spec in specs])

    async def rows(self, statement: Any, values: Any = None) -> Sequence[Row[Any]]:
        """Run one query of the test's own."""
        async with self.engine.connect() as connection:
            return (await connection.execute(statement, values)).all()

    async def write(self, *statements: Any) -> None:
        """Run statements of the test's own in one transaction."""
        async with self.engine.begin() as connection:
            for statement in statements:
                await connection.execute(statement)

    async def states(self) -> Counter[str]:
        """Return how many jobs are in which state."""
        query = select(JobRow.state, func.count()).group_by(JobRow.state)
        return Counter(dict(map(tuple, await self.rows(query))))

    async def all_ended(self, within: float) -> Counter[str]:
        """Wait until every job has ended; returns how many ended how."""
        await wait_until(self._all_ended, within, "every job has ended")
        return await self.states()

    async def _all_ended(self) -> bool:
        return set(await self.states()) <= set(TERMINAL)

    async def check_alive(self, *workers: WorkerProcess) -> None:
        """Check that workers live and start fresh jobs in time, and that nothing was left over."""
        await asyncio.gather(*map(self._check_alive, workers))
        counts = await self.states()
        assert counts["leased"] + counts["running"] == 0, counts
        report = await self.scheduler.check(grace=SLACK)
        # Some cases have jobs that nobody is to run.
        wrong = [one for one in report.findings if one.rule != "type that no live worker serves"]
        assert not wrong, report
        for worker in self.workers:
            assert not worker.surprises(), worker.output()

    async def _check_alive(self, worker: WorkerProcess) -> None:
        assert worker.exit_code is None, worker.output()
        job = await self.add(f"fresh for {worker.id}", queue=worker.id)
        assert await self.scheduler.wait(job, timeout=2 * POLL + SLACK) == 1

    async def freeze(self, *workers: WorkerProcess) -> None:
        """Stop processes with SIGSTOP, outside of transactions where these lock a whole file."""
        for worker in workers:
            worker.freeze()
            while not self._file_is_free():
                worker.send(signal.SIGCONT)
                await asyncio.sleep(0.01)
                worker.freeze()

    def _file_is_free(self) -> bool:
        """Tell whether nobody holds the write lock of SQLite's file."""
        if self.engine.dialect.name != "sqlite":
            return True
        with closing(sqlite3.connect(str(self.engine.url.database), timeout=0)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            connection.rollback()
            return True

    def end(self) -> None:
        """End the workers that are left, and show what they logged if the test failed."""
        for worker in self.workers:
            worker.kill()
            print(f"--- worker {worker.id}, process {worker.pid}:\n{worker.output()}")

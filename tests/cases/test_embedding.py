"""A scheduler that is made at import, as web applications do, meets several event loops.

Each time it must work on the loop that runs, keep nothing of the one before, leave the program's
signal handlers alone, and let the process exit by itself, also if nobody closed it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from asyncjobq import Scheduler
from cases.workers import FULL

TESTS = Path(__file__).parents[1]
EXIT_WITHIN = 5.0
BAD_SIGNS = (
    "Warning",
    "Traceback",
    "different loop",
    "loop is closed",
    "never awaited",
    "never retrieved",
    "Task was destroyed",
)


async def test_three_event_loops_in_one_process(prepared_url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "dev", "-W", "error", "-m", "cases.embedding_program"),
        prepared_url,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            told = await process.stdout.readline()
        async with asyncio.timeout(EXIT_WITHIN):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    text = errors.decode()
    assert (told, process.returncode) == (b"done\n", 0), text
    assert [sign for sign in BAD_SIGNS if sign in text] == [], text


class Reloading:
    """A server that starts its application anew whenever its file changes."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process = process
        self._folder = folder
        self._touched = 0

    def reported(self) -> list[tuple[str, int]]:
        """Return what the application's processes have reported, in order."""
        file = self._folder / "report"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(line.split()[0], int(line.split()[1])) for line in lines]

    def errors(self) -> str:
        return (self._folder / "errors").read_text()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, which looks at what was reported."""
        async with asyncio.timeout(60):
            while not condition():
                assert self.process.returncode is None, self.errors()
                await asyncio.sleep(0.05)

    async def up(self, count: int) -> int:
        """Wait until so many processes have come up in all; return the last."""
        await self.until(lambda: [word for word, _ in self.reported()].count("up") == count)
        return self.reported()[-1][1]

    async def touch(self) -> None:
        """Change the file until the process that runs is told to stop.

        The server remembers the file's time from its first look on, of which it tells nobody.
        """
        before = len(self.reported())

        def told_to_stop() -> bool:
            self._touched += 1
            later = 2_000_000_000 + self._touched
            os.utime(self._folder / "reloaded_app.py", (later, later))
            return len(self.reported()) > before

        await self.until(told_to_stop)


@asynccontextmanager
async def reloading(url: str, folder: Path) -> AsyncIterator[Reloading]:
    """Run a server on a copy of the application."""
    shutil.copy(TESTS / "cases" / "reloaded_app.py", folder)
    (folder / "errors").touch()
    with (folder / "errors").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-X", "dev", "-m", "uvicorn", "reloaded_app:app", "--port", "0"),
            *("--reload", "--reload-delay", "0.05", "--lifespan", "on"),
            cwd=folder,
            env={**os.environ, "DATABASE": url, "REPORT": str(folder / "report")},
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=errors,
        )
        server = Reloading(process, folder)
        try:
            yield server
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_server_that_reloads_the_application(prepared_url: str, tmp_path: Path) -> None:
    """After each change of the file one scheduler is alive, the new one; at the end none is."""
    async with reloading(prepared_url, tmp_path) as server, Scheduler(prepared_url) as scheduler:
        pids = [await server.up(1)]
        for number in range(3 if FULL else 1):
            await server.touch()
            pids.append(await server.up(number + 2))
            assert [pid for pid in pids if is_there(pid)] == pids[-1:]
            job = await scheduler.enqueue("whereabouts")
            assert await scheduler.wait(job, timeout=30) == pids[-1]
        server.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(EXIT_WITHIN):
            await server.process.wait()
        reported, text = server.reported(), server.errors()
    assert reported == [(word, pid) for pid in pids for word in ("up", "stopping", "down")]
    assert server.process.returncode in (0, -signal.SIGINT), text
    assert [pid for pid in pids if is_there(pid)] == []
    assert [sign for sign in BAD_SIGNS if sign in text] == [], text

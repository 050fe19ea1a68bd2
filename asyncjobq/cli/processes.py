"""Workers in processes of their own, for the demo."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from tempfile import TemporaryFile
from typing import IO

from asyncjobq.cli.errors import CommandError


class WorkerProcess:
    """A process of `asyncjobq worker`."""

    def __init__(self, process: Process, log: IO[bytes]) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def check(self) -> None:
        """Raise CommandError, with the last of what it logged, if the worker has ended."""
        if self._process.returncode is not None:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").splitlines()[-3:]
            raise CommandError(f"The worker ended ({self._process.returncode}): {' '.join(lines)}")

    def freeze(self) -> None:
        """Let it stand still."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        """Let it end in good order, if it has not ended."""
        if self._process.returncode is None:
            self._process.terminate()
            self.thaw()
            await self._process.wait()


@asynccontextmanager
async def worker_process(
    arguments: Sequence[str], variables: Mapping[str, str]
) -> AsyncIterator[WorkerProcess]:
    """Run `asyncjobq worker` with these arguments and environment variables beside this block."""
    command = (sys.executable, "-m", "asyncjobq", "worker", *arguments)
    with TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **variables}, stdin=DEVNULL, stdout=log, stderr=log
        )
        worker = WorkerProcess(process, log)
        try:
            yield worker
        finally:
            await worker.stop()

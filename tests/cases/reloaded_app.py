"""A web application that runs jobs beside its requests, for a server that reloads its code.

It is copied, so that the copy can be touched. It writes what it does to the file REPORT.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from asyncjobq import Scheduler

SIGNALS = (signal.SIGINT, signal.SIGTERM)

scheduler = Scheduler(os.environ["DATABASE"], poll_interval=0.1)


@scheduler.handler
async def whereabouts() -> int:
    """Return the process in which the job runs."""
    return os.getpid()


def report(word: str) -> None:
    with open(os.environ["REPORT"], "a") as file:  # noqa: PTH123
        file.write(f"{word} {os.getpid()}\n")


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Speak the protocol of lifespans, and of nothing else."""
    assert scope["type"] == "lifespan"
    await receive()
    before = [signal.getsignal(number) for number in SIGNALS]
    async with scheduler.serving():
        same = before == [signal.getsignal(number) for number in SIGNALS]
        report("up" if same else "hijacked")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        report("stopping")
    await scheduler.aclose()
    report("down")
    await send({"type": "lifespan.shutdown.complete"})

"""`worker`: run jobs until told to stop, or until there are none."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from asyncjobq.cli.errors import UsageError
from asyncjobq.cli.loading import load_scheduler
from asyncjobq.cli.place import AppDir
from asyncjobq.cli.status_line import StatusLine
from asyncjobq.lifetime import signals_handled
from asyncjobq.scheduler import Scheduler

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def worker(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:OBJECT", help="A Scheduler, or a function that makes one."),
    ],
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Slots, instead of the scheduler's own number.")
    ] = None,
    queues: Annotated[
        str | None, typer.Option(help="Queues to serve, with commas, instead of its own.")
    ] = None,
    until_idle: Annotated[
        bool,
        typer.Option(
            "--until-idle", help="End once nothing of its queues and types can run or runs."
        ),
    ] = False,
    app_dir: AppDir = Path(),
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run jobs until SIGTERM or Ctrl-C.

    The first lets running jobs end, a second one interrupts them. On a terminal, the last line says
    what is going on, unless the application has set up logging of its own.
    """
    scheduler = load_scheduler(target, app_dir)
    scheduler.settings = scheduler.settings.overridden(
        concurrency=concurrency,
        queues=None if queues is None else [name.strip() for name in queues.split(",")],
    )
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if console.is_interactive and not logging.getLogger().handlers:
        with StatusLine(scheduler, console) as line:
            _log(log_level, line)
            asyncio.run(_work(scheduler, until_idle=until_idle))
    else:
        _log(log_level)
        asyncio.run(_work(scheduler, until_idle=until_idle))
    _end_despite_threads()


async def _work(scheduler: Scheduler, *, until_idle: bool) -> None:
    if not until_idle:
        await scheduler.serve_until_signalled()
        return
    told = asyncio.Event()

    def stop() -> None:
        told.set()
        scheduler.stop()

    with signals_handled(stop, partial(scheduler.stop, now=True)):
        counts = await scheduler.drain()
    ended = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    why = "Stopped" if told.is_set() else "Nothing is left to run"
    typer.echo(f"{why}: {ended or 'no job has ended'}.")


def _log(level: str, handler: logging.Handler | None = None) -> None:
    """Log to the standard error, unless the application has set up its own logging."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise UsageError(f"{level!r} is no log level; use debug, info, warning or error")
    handlers = None if handler is None else [handler]
    logging.basicConfig(level=number, format=LOG_FORMAT, handlers=handlers)


def _end_despite_threads() -> None:
    """End the process if `def` handlers that were left behind would hold it until they return."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if all(thread.daemon for thread in others):
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

"""The commands and their options."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from sqlalchemy.exc import DBAPIError

import asyncjobq
from asyncjobq.cli.demo import Demo, run_demo
from asyncjobq.cli.doctor import doctor
from asyncjobq.cli.errors import CommandError, UsageError
from asyncjobq.cli.loading import load_scheduler, scheduler_of
from asyncjobq.codec import one_line
from asyncjobq.errors import AsyncJobQError
from asyncjobq.scheduler import Scheduler

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

app = typer.Typer(
    name="asyncjobq",
    help="Jobs on the database that you already have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

AppDir = Annotated[
    Path, typer.Option(help="Where to look for MODULE first.", exists=True, file_okay=False)
]


def run() -> None:
    """Run the command; errors that the user can act on are one red line."""
    try:
        app(prog_name="asyncjobq")
    except CommandError as error:
        _exit(error, error.exit_code)
    except AsyncJobQError as error:
        _exit(error, 1)
    except DBAPIError as error:
        _exit(error.orig or error, 1)


def _exit(error: BaseException, code: int) -> None:
    message = one_line(" ".join(str(error).split()), 2000)
    Console(stderr=True, soft_wrap=True).print(Text(f"Error: {message}", style="red"))
    raise SystemExit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asyncjobq {asyncjobq.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Jobs on the database that you already have."""


@app.command()
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
    app_dir: AppDir = Path(),
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run jobs until SIGTERM or Ctrl-C.

    The first lets running jobs end, a second one interrupts them.
    """
    scheduler = load_scheduler(target, app_dir)
    scheduler.settings = scheduler.settings.overridden(
        concurrency=concurrency,
        queues=None if queues is None else [name.strip() for name in queues.split(",")],
    )
    _log(log_level)
    scheduler.run()
    _end_despite_threads()


def _log(level: str) -> None:
    """Log to the standard error, unless the application has set up its own logging."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise UsageError(f"{level!r} is no log level; use debug, info, warning or error")
    logging.basicConfig(level=number, format=LOG_FORMAT)


def _end_despite_threads() -> None:
    """End the process if `def` handlers that were left behind would hold it until they return."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if all(thread.daemon for thread in others):
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@app.command()
def init(
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:OBJECT", help="A Scheduler, or a function that makes one."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The database, without MODULE; or set ASYNCJOBQ_URL.")
    ] = None,
    schema: Annotated[str | None, typer.Option(help="The tables' schema, without MODULE.")] = None,
    table_prefix: Annotated[str, typer.Option(help="Their prefix, without MODULE.")] = "",
    app_dir: AppDir = Path(),
) -> None:
    """Create or upgrade the tables.

    Does nothing when they are up to date, and may be run by many processes at once.
    """
    scheduler = scheduler_of(target, url, schema, table_prefix, app_dir)
    asyncio.run(_create_schema(scheduler))
    typer.echo(f"The tables in {scheduler.url} are there and up to date.")


async def _create_schema(scheduler: Scheduler) -> None:
    async with scheduler:
        await scheduler.create_schema()


app.command()(doctor)


@app.command()
def demo(
    path: Annotated[
        Path | None,
        typer.Argument(help="A folder of Python files; the standard library if left out."),
    ] = None,
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill the worker half way; a second one finishes.")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="Another database than a temporary SQLite file.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the SQLite file here.")] = None,
    max_files: Annotated[
        int, typer.Option(min=1, help="Read no more files than this.")
    ] = Demo.max_files,
) -> None:
    """Report on Python source, a job for each file.

    The report is a job too, which waits for all others. Everything happens in a temporary SQLite
    file, or with --url in tables of its own, which are dropped afterwards.
    """
    asyncio.run(run_demo(Demo(path, kill, url, keep, max_files), Console()))

"""The commands, and how they end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from sqlalchemy.exc import DBAPIError

import asyncjobq
from asyncjobq.cli import changing, listing, one, overview
from asyncjobq.cli.demo import Demo, run_demo
from asyncjobq.cli.doctor import doctor
from asyncjobq.cli.enqueuing import enqueue
from asyncjobq.cli.errors import REFUSED, WRONG_CALL, CommandError
from asyncjobq.cli.loading import scheduler_of
from asyncjobq.cli.place import AppDir
from asyncjobq.cli.working import worker
from asyncjobq.codec import one_line
from asyncjobq.errors import AsyncJobQError, ConfigurationError
from asyncjobq.scheduler import Scheduler

app = typer.Typer(
    name="asyncjobq",
    help="Jobs on the database that you already have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def run() -> None:
    """Run the command; errors that the user can act on are one red line."""
    try:
        app(prog_name="asyncjobq")
    except CommandError as error:
        _exit(error, error.exit_code)
    except ConfigurationError as error:
        _exit(error, WRONG_CALL)
    except AsyncJobQError as error:
        _exit(error, REFUSED)
    except DBAPIError as error:
        _exit(error.orig or error, REFUSED)


def _exit(error: BaseException, code: int) -> None:
    message = one_line(" ".join(str(error).split()), 2000)
    Console(stderr=True, soft_wrap=True).print(Text(f"Error: {message}", style="red"))
    raise SystemExit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asyncjobq {asyncjobq.__version__}")
        raise typer.Exit


@app.callback(
    epilog="Ends with 0; with 1 if what was named is not there or was refused, or the database is "
    "away; with 2 if it was called wrongly, or the settings or tables are wrong."
)
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Jobs on the database that you already have."""


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


app.command()(worker)
app.command()(enqueue)
app.command()(listing.jobs)
app.command()(one.show)
app.command()(one.graph)
app.command()(overview.stats)
app.command()(overview.workers)
app.command()(overview.limits)
app.command()(overview.schedules)
app.command()(changing.cancel)
app.command()(changing.retry)
app.command()(changing.pause)
app.command()(changing.resume)
app.command()(changing.prune)
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

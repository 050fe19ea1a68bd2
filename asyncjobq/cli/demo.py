"""`asyncjobq demo`: run the jobs of examples/source_report.py and show them at work.

The jobs, their graph and their report are the example's. Here they get a database, are watched in
it, and lose their worker if that was asked for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console
from sqlalchemy import make_url

from asyncjobq.cli.drawing import counted, draw_ends, draw_report, progress_bar
from asyncjobq.cli.errors import CommandError, UsageError
from asyncjobq.cli.loading import import_module
from asyncjobq.cli.processes import WorkerProcess, worker_process
from asyncjobq.cli.watching import Watch, ended, in_flight, own_tables
from asyncjobq.clock import monotonic
from asyncjobq.scheduler import Scheduler

EXAMPLE: Final = "source_report"


@dataclass(frozen=True)
class Demo:
    """What was asked for on the command line."""

    path: Path | None = None
    kill: bool = False
    url: str | None = None
    keep: Path | None = None
    max_files: int = 2000


async def run_demo(wanted: Demo, console: Console) -> None:
    """Run the demo and draw its report."""
    example = import_module(EXAMPLE, examples_folder())
    root = (wanted.path or example.STANDARD_LIBRARY).resolve()
    files = _files_below(root, example, wanted.max_files)
    prefix = f"demo_{secrets.token_hex(3)}_" if wanted.url else ""
    with _database(wanted) as url:
        async with own_tables(url, prefix) as tables, _scheduler(url, prefix, example) as scheduler:
            console.print(_headline(len(files), root, wanted), highlight=False, soft_wrap=True)
            await scheduler.create_schema()
            report = await example.enqueue_report(scheduler, root, files)
            begun = monotonic()
            with progress_bar(console) as bar:
                watch = Watch(tables, bar, total=len(files) + 1)
                if wanted.kill:
                    await _kill_a_worker(watch, url, prefix, console)
                else:
                    async with scheduler.serving():
                        await watch.until_all_ended()
            seconds = monotonic() - begun
            draw_report(console, await scheduler.wait(report), root)
            draw_ends(console, await scheduler.find(limit=watch.total), seconds)


def _scheduler(url: str, prefix: str, example: Any) -> Scheduler:
    handlers, slots = [example.handlers], example.SLOTS
    return Scheduler(url, handlers=handlers, concurrency=slots, table_prefix=prefix)


async def _kill_a_worker(watch: Watch, url: str, prefix: str, console: Console) -> None:
    arguments = ("--app-dir", str(examples_folder()), f"{EXAMPLE}:worker_scheduler")
    variables = {"ASYNCJOBQ_URL": url, "SOURCE_REPORT_PREFIX": prefix}
    async with worker_process(arguments, variables) as first:
        console.print(f"Worker 1 is process {first.pid}; half way it is killed with SIGKILL.")
        held = await _frozen_half_way(watch, first)
        await first.kill()
    console.print(
        f"Worker 1 was killed with {held} jobs in its hands. Their leases run out within\n"
        "2 seconds, which is short (30 is usual); then they are anybody's."
    )
    async with worker_process(arguments, variables) as second:
        console.print(f"Worker 2 is process {second.pid}.")
        await watch.until_all_ended(second.check)


async def _frozen_half_way(watch: Watch, worker: WorkerProcess) -> int:
    """Freeze the worker half way, with jobs in its hands; return how many.

    Between two batches it has none, and killing it then would show nothing.
    """
    while True:
        await watch.until(lambda now: ended(now) >= watch.total // 2, worker.check)
        worker.freeze()
        states = await watch.look()
        if in_flight(states) or ended(states) == watch.total:
            return in_flight(states)
        worker.thaw()
        await asyncio.sleep(0.01)


def examples_folder() -> Path:
    """Return where the example is: in the installed package, or beside it in a clone."""
    package = Path(__file__).parents[1]
    for folder in (package / "examples", package.parent / "examples"):
        if (folder / f"{EXAMPLE}.py").exists():
            return folder
    raise CommandError(f"This installation of asyncjobq lacks its file examples/{EXAMPLE}.py.")


def _files_below(root: Path, example: Any, most: int) -> list[Path]:
    if not root.is_dir():
        raise UsageError(f"{root} is no folder.")
    files = list(islice(example.source_files(root), most))
    if not files:
        raise UsageError(f"There are no Python files below {root}.")
    return files


@contextmanager
def _database(wanted: Demo) -> Iterator[str]:
    """Give the URL of the database: the one asked for, or a SQLite file."""
    if wanted.url and wanted.keep:
        raise UsageError("--keep is for the SQLite file that is used without --url.")
    if wanted.keep and wanted.keep.exists():
        raise UsageError(f"{wanted.keep} exists; name a new file to keep the jobs in.")
    with TemporaryDirectory(prefix="asyncjobq-demo-") as folder:
        file = wanted.keep or Path(folder, "jobs.db")
        yield wanted.url or f"sqlite+aiosqlite:///{file.resolve()}"


def _headline(count: int, root: Path, wanted: Demo) -> str:
    if wanted.url:
        place = make_url(wanted.url).render_as_string(hide_password=True)
    else:
        place = f"SQLite, {wanted.keep or 'in a temporary file'}"
    first = "The first " if count == wanted.max_files else ""
    found = f"{first}{counted(count, 'Python file')} below {root}"
    return f"{found}: a job for each, and one that sums them up.\nDatabase: {place}"

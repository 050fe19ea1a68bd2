"""Report on a folder of Python source: a job for each file, and one that sums up all of them.

    python examples/source_report.py [FOLDER]

`asyncjobq demo` runs the same jobs and draws them.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import os
import sys
import sysconfig
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypedDict

from asyncjobq import Handlers, Job, JobContext, Scheduler

STANDARD_LIBRARY: Final = Path(sysconfig.get_path("stdlib"))
# "test": the standard library's own tests are larger than the rest of it.
SKIPPED: Final = {"__pycache__", "dist-packages", "node_modules", "site-packages", "test"}
SLOTS: Final = 20

# What the parser thinks of other people's string literals is not our business.
warnings.filterwarnings("ignore", module="<unknown>")

# In several threads at once, ast.parse may raise SystemError (Python 3.11).
parsing = threading.Lock()

handlers = Handlers()


class FileFacts(TypedDict):
    """The result of `examine`."""

    sha256: str
    bytes: int
    lines: int
    imports: list[str]
    problem: str | None


class FolderTotals(TypedDict):
    """What the files of one folder add up to."""

    folder: str
    files: int
    lines: int
    bytes: int


class Report(TypedDict):
    """The result of `sum_up`: biggest folders and most imported modules first."""

    files: int
    lines: int
    bytes: int
    copies: int
    folders: list[FolderTotals]
    imports: list[tuple[str, int]]
    problems: list[str]


@handlers.handler(timeout=60)
def examine(path: str) -> FileFacts:
    """Hash, count and parse one file. It is no `async def`, so it runs in a thread."""
    source, imports, problem = b"", set[str](), None
    try:
        source = Path(path).read_bytes()
        imports = imported_modules(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = f"{type(error).__name__}: {error}"
    return {
        "sha256": hashlib.sha256(source).hexdigest(),
        "bytes": len(source),
        "lines": len(source.splitlines()),
        "imports": sorted(imports),
        "problem": problem,
    }


@handlers.handler(timeout=60)
async def sum_up(ctx: JobContext) -> Report:
    """Add up the results of all the jobs that this one depends on."""
    jobs: list[Job[FileFacts]] = await ctx.upstreams()
    facts = [job.result for job in jobs]
    return {
        "files": len(facts),
        "lines": sum(one["lines"] for one in facts),
        "bytes": sum(one["bytes"] for one in facts),
        "copies": len(facts) - len({one["sha256"] for one in facts}),
        "folders": folder_totals(jobs),
        "imports": Counter(name for one in facts for name in one["imports"]).most_common(10),
        "problems": [f"{job.args['path']}: {p}" for job in jobs if (p := job.result["problem"])],
    }


async def enqueue_report(scheduler: Scheduler, root: Path, files: list[Path]) -> Job[Report]:
    """Enqueue a job for each file, and one that waits for all of them.

    Top-level folders are groups, which take turns: a small one need not wait for a big one's end.
    """
    specs = [examine.job(str(file)).options(group_key=top_folder(file, root)) for file in files]
    examined = await scheduler.enqueue_many(specs)
    return await scheduler.enqueue(sum_up.job(), depends_on=examined)


def imported_modules(source: bytes) -> set[str]:
    """Return the top-level names of the modules that a source imports."""
    with parsing:
        tree = ast.parse(source)
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                found.update(alias.name.partition(".")[0] for alias in aliases)
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
    return found


def folder_totals(jobs: list[Job[FileFacts]]) -> list[FolderTotals]:
    """Add up by folder."""
    folders: dict[str, FolderTotals] = {}
    for job in jobs:
        empty: FolderTotals = {"folder": job.group_key, "files": 0, "lines": 0, "bytes": 0}
        totals = folders.setdefault(job.group_key, empty)
        totals["files"] += 1
        totals["lines"] += job.result["lines"]
        totals["bytes"] += job.result["bytes"]
    return sorted(folders.values(), key=lambda totals: totals["bytes"], reverse=True)


def source_files(root: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, in a fixed order."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in SKIPPED and name[0] != ".")
        for path in (Path(folder, name) for name in sorted(files)):
            # A path that is no text cannot be an argument.
            if path.suffix == ".py" and str(path).isprintable():
                yield path


def top_folder(file: Path, root: Path) -> str:
    """Return the first folder on the way from the root to a file."""
    return file.relative_to(root).parts[0] if file.parent != root else "(top level)"


def worker_scheduler() -> Scheduler:
    """Make the scheduler of `asyncjobq worker --app-dir examples source_report:worker_scheduler`.

    Its lease is short, so that the jobs of a worker that is killed are soon another's.
    """
    return Scheduler(
        os.environ["ASYNCJOBQ_URL"],
        handlers=[handlers],
        concurrency=SLOTS,
        lease_ttl=2,
        table_prefix=os.environ.get("SOURCE_REPORT_PREFIX", ""),
    )


async def main(root: Path) -> None:
    """Run the jobs on a database that lasts as long as this program, and print the report."""
    with TemporaryDirectory() as folder:
        url = f"sqlite+aiosqlite:///{folder}/jobs.db"
        async with Scheduler(url, handlers=[handlers], concurrency=SLOTS) as scheduler:
            await scheduler.create_schema()
            async with scheduler.serving():
                job = await enqueue_report(scheduler, root, list(source_files(root)))
                report = await scheduler.wait(job)
    print(f"{report['files']:,} files, {report['lines']:,} lines, {report['bytes']:,} bytes")
    for totals in report["folders"][:10]:
        print(f"{totals['lines']:10,} lines in {totals['folder']}")
    for module, count in report["imports"]:
        print(f"{count:10,} files import {module}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if sys.argv[1:] else STANDARD_LIBRARY).resolve()))

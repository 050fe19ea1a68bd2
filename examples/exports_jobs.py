"""The jobs of exports_web.py, for workers in processes of their own.

    asyncjobq worker exports_jobs:scheduler --app-dir examples

The database is DATABASE_URL, or else the file exports.db in the current directory; EXPORTS is
another folder for the files than exports.
"""

import csv
import os
import time
from pathlib import Path
from typing import Final

from asyncjobq import Cancel, JobContext, Scheduler

FOLDER: Final = Path(os.environ.get("EXPORTS", "exports"))

scheduler = Scheduler(
    os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///exports.db"),
    queues={"exports": 4},
    lease_ttl=10,  # an export whose worker dies is begun again by another after ten seconds
)


@scheduler.handler(timeout=600, queue="exports")
def write_export(ctx: JobContext, owner: str, rows: int) -> str:
    """Write a long file row by row, in a thread; begun again, it takes the place of the first."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{ctx.job_id}.csv"
    unfinished = path.with_suffix(f".{ctx.attempt}")
    try:
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            for number in range(rows):
                if ctx.cancel_requested:  # a thread has to look for itself
                    raise Cancel(f"{owner} wants it no more")
                writer.writerow([number, owner])
                ctx.progress(number + 1, rows)
                time.sleep(0.001)  # the queries that a real export would make
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path.name

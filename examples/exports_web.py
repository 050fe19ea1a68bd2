"""A web process that only enqueues; workers of their own do the work, and may be elsewhere.

    python examples/exports_web.py
    asyncjobq worker exports_jobs:scheduler --app-dir examples      as many as you like
    curl -X POST 'http://127.0.0.1:8000/exports?owner=ada&rows=2000'
    curl 'http://127.0.0.1:8000/exports/1?wait=30'
    curl -X DELETE http://127.0.0.1:8000/exports/1

Neither imports the other: jobs are named by their type, so that what the workers need (a library of
their own, a model, a font) is not installed here. What both must agree on is the database, the
types and queues, and the arguments. The database is DATABASE_URL, or else the file exports.db in
the current directory; PORT is another port than 8000.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Query

from asyncjobq import Job, JobEndedError, JobNotFoundError, Scheduler

scheduler = Scheduler(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///exports.db"))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    await scheduler.create_schema()
    async with scheduler:  # without serving(): no job runs in this process
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/exports", status_code=202)
async def order_export(owner: str, rows: Annotated[int, Query(gt=0)] = 1000) -> dict[str, Any]:
    """Order an export; who presses the button again while it is made gets the same one."""
    job = await scheduler.enqueue(
        "write_export",
        {"owner": owner, "rows": rows},
        queue="exports",
        group_key=owner,
        unique_key=f"write_export {owner}",
    )
    return {"export": job.id, "new": not job.existing}


@app.get("/exports/{job_id}")
async def read_export(
    job_id: int, wait: Annotated[float, Query(ge=0, le=60)] = 0
) -> dict[str, Any]:
    """Say how far an export is; with `wait`, once it has ended, or after so many seconds."""
    await export(job_id)
    if wait:
        with suppress(TimeoutError, JobEndedError):  # what has become of it is told below
            await scheduler.wait(job_id, timeout=wait)
    job = await export(job_id)
    return {"state": job.state, "progress": job.progress, "file": job.result}


@app.delete("/exports/{job_id}", status_code=202)
async def cancel_export(job_id: int) -> dict[str, str]:
    """Cancel an export; one that is being written ends soon."""
    await export(job_id)
    return {"cancelled": await scheduler.cancel(job_id)}


async def export(job_id: int) -> Job[str]:
    """Return the job of an export; whatever else may be in the tables is nobody's business here."""
    with suppress(JobNotFoundError):
        job = await scheduler.get(job_id)
        if job.type == "write_export":
            return job
    raise HTTPException(404, f"There is no export {job_id}.")


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))

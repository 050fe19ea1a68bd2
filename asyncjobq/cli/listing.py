"""`jobs`: which jobs there are, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from asyncjobq.cli.place import AsJson, on_scheduler
from asyncjobq.cli.showing import cell, console, moment, print_json, state_cell, table_of_jobs
from asyncjobq.job import Job
from asyncjobq.scheduler import Scheduler
from asyncjobq.states import State

FOLLOWED: Final = 200
"""The newest jobs, so many, whose states are followed."""

States = Annotated[list[State] | None, typer.Option("--state", help="May be given several times.")]
Type = Annotated[str | None, typer.Option("--type", help="The handler's type.")]
Queue = Annotated[str | None, typer.Option("--queue", help="The queue.")]
Group = Annotated[str | None, typer.Option("--group", help="The group's key.")]


@on_scheduler
async def jobs(
    scheduler: Scheduler,
    states: States = None,
    type_: Type = None,
    queue: Queue = None,
    group: Group = None,
    parent: Annotated[int | None, typer.Option(help="What they are directly in.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="How many.")] = 20,
    after: Annotated[int, typer.Option(min=0, help="Those behind this id, in this order.")] = 0,
    oldest: Annotated[bool, typer.Option("--oldest/--newest", help="Which come first.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on: a line for each new job and state.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two looks, with --follow.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first.

    With --json a list of objects, whose keys are the fields of `Job`; with --follow, an object a
    line. Jobs that ended are found by id alone: a rare state among millions takes its time.
    """
    wanted: dict[str, Any] = {
        "state": states or None,
        "type": type_,
        "queue": queue,
        "group_key": group,
        "parent": parent,
    }
    if follow:
        await _follow(scheduler, wanted, limit, interval, as_json=as_json)
        return
    found = await scheduler.find(**wanted, limit=limit, after=after, newest=not oldest)
    if as_json:
        print_json(found)
    else:
        console().print(table_of_jobs(found) if found else "There are none.")


async def _follow(
    scheduler: Scheduler, wanted: dict[str, Any], first: int, interval: float, *, as_json: bool
) -> None:
    out = console()
    try:
        async for job in _changes(scheduler, wanted, first, interval):
            if as_json:
                print_json(job, one_line=True)
            else:
                name = cell(job.name or job.type, limit=60)
                line = Text(f"{moment(job.updated_at)}  {job.id:>8}  ")
                line = line.append_text(state_cell(job.state)).append(" " * (11 - len(job.state)))
                out.print(line.append_text(name), soft_wrap=True)
    except asyncio.CancelledError:  # Ctrl-C is how one stops looking
        return


async def _changes(
    scheduler: Scheduler, wanted: dict[str, Any], first: int, interval: float
) -> AsyncIterator[Job[Any]]:
    """Yield the last jobs, then each of the newest that is new or whose state is, for ever."""
    anything = {**wanted, "state": None}
    known: dict[int, tuple[State, int]] | None = None
    while True:
        newest = (await scheduler.find(**anything, limit=FOLLOWED, newest=True))[::-1]
        if known is None:
            shown = [job for job in newest if _matches(job, wanted)][-first:] if first else []
        else:
            news = [job for job in newest if known.get(job.id) != (job.state, job.attempt)]
            shown = [job for job in news if _matches(job, wanted)]
        for job in shown:
            yield job
        known = {job.id: (job.state, job.attempt) for job in newest}
        await asyncio.sleep(interval)


def _matches(job: Job[Any], wanted: dict[str, Any]) -> bool:
    return wanted["state"] is None or job.state in wanted["state"]

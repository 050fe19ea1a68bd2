"""`stats`, `limits`, `schedules` and `workers`: what there is, at a glance."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from rich.text import Text

from asyncjobq.cli.place import AsJson, on_scheduler
from asyncjobq.cli.showing import (
    cell,
    console,
    moment,
    plain,
    print_json,
    table,
)
from asyncjobq.limit_states import LimitState
from asyncjobq.reasons import duration
from asyncjobq.scheduler import Scheduler
from asyncjobq.states import State

Most = Annotated[int, typer.Option(min=1, help="Jobs of a kind that are counted at the most.")]


@on_scheduler
async def stats(scheduler: Scheduler, most: Most = 10_000, as_json: AsJson = False) -> None:
    """Count jobs by queue, type and state, and say what is paused.

    With --json an object of `kinds` (`queue`, `type` and `jobs` by state), `whole` (whether all
    jobs were counted), `limits` and `paused`.
    """
    found, paused = await scheduler.stats(most=most), await scheduler.paused()
    if as_json:
        print_json({**plain(found), "limits": list(map(_limit, found.limits)), "paused": paused})
        return
    out = console()
    states = [state for state in State if found.jobs[state]]
    made = table("Queue", "Type", *states, right=states)
    for kind in found.kinds:
        counts = (kind.jobs.get(state, 0) for state in states)
        numbers = [Text(f"{count:,}" if count else "") for count in counts]
        made.add_row(cell(kind.queue), cell(kind.type), *numbers)
    out.print(made if found.kinds else "There are no jobs.")
    if not found.whole:
        out.print(Text(f"Of more than {most:,} jobs, not all were counted (--most).", style="dim"))
    for pause in paused:
        what = f"queue {pause.queue!r}" if pause.queue is not None else f"type {pause.type!r}"
        out.print(Text(f"The {what} is paused since {moment(pause.paused_at)}.", style="yellow"))


@on_scheduler
async def limits(
    scheduler: Scheduler,
    job: Annotated[int | None, typer.Option(help="Those of this job.")] = None,
    most: Most = 10_000,
    as_json: AsJson = False,
) -> None:
    """Show how limits are used; they are in the code, so name the application with --app.

    With --json a list of objects with the fields of `LimitState`; `opens_in` is "never" for one
    that has to be changed first.
    """
    found = await scheduler.limits(*(() if job is None else (job,)), most=most)
    if as_json:
        print_json([_limit(limit) for limit in found])
        return
    made = table(
        "Limit", "Of", "Kind", "Used", "Allowed", "Waiting", "Room", right=["Used", "Waiting"]
    )
    for limit in found:
        per = "" if limit.per is None else f" per {duration(limit.per)}"
        amount = "?" if math.isinf(limit.amount) else f"{limit.amount:g}{per}"
        numbers = Text(f"{limit.used:g}"), Text(amount), Text(f"{limit.waiting:,}")
        room = Text(_room(limit), style="red" if limit.full else "")
        made.add_row(cell(limit.name), cell(limit.value), Text(limit.kind), *numbers, room)
    if found:
        console().print(made)
    else:
        console().print("No limit that is known here is used. Those of an application: --app.")


def _limit(limit: LimitState) -> dict[str, Any]:
    never = limit.opens_in is not None and math.isinf(limit.opens_in)
    return {**plain(limit), **({"opens_in": "never"} if never else {})}


def _room(limit: LimitState) -> str:
    if limit.full is None:
        return "only workers know"
    if not limit.full:
        return "yes"
    if limit.opens_in is None:
        return "when a job ends"
    return "never" if math.isinf(limit.opens_in) else f"in {duration(limit.opens_in)}"


@on_scheduler
async def schedules(scheduler: Scheduler, as_json: AsJson = False) -> None:
    """List recurring jobs, with their next and last times.

    With --json a list of objects with the fields of `Schedule`.
    """
    found = await scheduler.schedules()
    if as_json:
        print_json(found)
        return
    made = table("Name", "Type", "When", "Next", "Last", "Last job", right=["Last job"])
    for one in found:
        every = "" if one.every is None else f"every {duration(one.every)}"
        when = f"{one.cron} {one.timezone}" if one.cron is not None else every
        coming = "paused" if one.paused else moment(one.next_fire)
        job = "" if one.last_job_id is None else str(one.last_job_id)
        times = Text(coming), Text(moment(one.last_fire)), Text(job)
        made.add_row(cell(one.name), cell(one.type), cell(when), *times)
    console().print(made if found else "There are none.")


@on_scheduler
async def workers(scheduler: Scheduler, as_json: AsJson = False) -> None:
    """List the workers that serve, and those gone a short time ago.

    With --json a list of objects with the fields of `WorkerState`.
    """
    found = await scheduler.workers()
    if as_json:
        print_json(found)
        return
    columns = ("Worker", "State", "Jobs", "Queues", "Types", "Host", "Pid", "Since", "Seen")
    made = table(*columns, right=["Jobs", "Pid"])
    for one in found:
        state = "stopping" if one.stopping else "serves"
        types = "many" if one.types is None else ", ".join(one.types)
        made.add_row(
            cell(one.worker_id),
            Text(state) if one.live else Text("gone", style="red"),
            Text(f"{sum(one.jobs.values())}/{one.concurrency}"),
            cell(", ".join(one.queues)),
            cell(types),
            cell(one.host),
            Text(str(one.pid)),
            Text(moment(one.started_at)),
            Text(f"{duration(one.silent_for)} ago"),
        )
    console().print(made if found else "No worker is there.")

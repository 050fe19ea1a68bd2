"""`cancel`, `retry`, `pause`, `resume` and `prune`."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import typer

from asyncjobq.cli.errors import REFUSED, UsageError
from asyncjobq.cli.listing import Group, Queue, States, Type
from asyncjobq.cli.place import on_scheduler
from asyncjobq.cli.showing import escaped
from asyncjobq.control import Cancelled
from asyncjobq.errors import InvalidJobError, JobNotFoundError
from asyncjobq.scheduler import Scheduler
from asyncjobq.states import TERMINAL, State

JobIds = Annotated[list[int] | None, typer.Argument(metavar="[ID]...", min=0, help="Jobs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it to all that match, unasked.")]

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SAID: Final = {
    Cancelled.CANCELLED: "is cancelled",
    Cancelled.REQUESTED: "is asked to end",
    Cancelled.ENDED: "had ended before",
}


@on_scheduler
async def cancel(
    scheduler: Scheduler,
    job_ids: JobIds = None,
    states: States = None,
    type_: Type = None,
    queue: Queue = None,
    group: Group = None,
    yes: Yes = False,
) -> int:
    """Cancel jobs, or containers with all that is in them: by id, or all that match the options.

    Ends with 1 if one of the ids is not there, or had ended before.
    """
    wanted = _wanted(job_ids, states, type_, queue, group)
    if job_ids:
        return await _each(job_ids, lambda job_id: _cancel(scheduler, job_id))
    _confirm("Cancel", wanted, yes=yes)
    counts = await scheduler.cancel_many(**wanted)
    cancelled, asked = counts[Cancelled.CANCELLED], counts[Cancelled.REQUESTED]
    typer.echo(f"{cancelled:,} are cancelled, {asked:,} are asked to end.")
    return 0


async def _cancel(scheduler: Scheduler, job_id: int) -> bool:
    answer = await scheduler.cancel(job_id)
    typer.echo(f"Job {job_id} {_SAID[answer]}.", err=answer is Cancelled.ENDED)
    return answer is not Cancelled.ENDED


@on_scheduler
async def retry(
    scheduler: Scheduler,
    job_ids: JobIds = None,
    states: States = None,
    type_: Type = None,
    queue: Queue = None,
    group: Group = None,
    yes: Yes = False,
) -> int:
    """Run failed or cancelled jobs again, and what their ends had cancelled: by id, or by options.

    By options, those that failed, unless --state says otherwise. Ends with 1 if one of the ids is
    not there, or is refused.
    """
    wanted = _wanted(job_ids, states, type_, queue, group)
    if job_ids:
        return await _each(job_ids, lambda job_id: _retry(scheduler, job_id))
    wanted = {"state": [State.FAILED], **wanted}
    _confirm("Run again", wanted, yes=yes)
    typer.echo(f"{await scheduler.retry_many(**wanted):,} are run again.")
    return 0


async def _retry(scheduler: Scheduler, job_id: int) -> bool:
    await scheduler.retry(job_id)
    typer.echo(f"Job {job_id} is run again.")
    return True


async def _each(job_ids: list[int], do: Callable[[int], Awaitable[bool]]) -> int:
    """Do it to each job; return 1 if it was refused for one, which is told, and 0 else."""
    code = 0
    for job_id in job_ids:
        try:
            done = await do(job_id)
        except (InvalidJobError, JobNotFoundError) as error:
            typer.echo(f"Error: {escaped(error)}", err=True)
            done = False
        code = code if done else REFUSED
    return code


def _wanted(
    job_ids: list[int] | None,
    states: list[State] | None,
    type_: str | None,
    queue: str | None,
    group: str | None,
) -> dict[str, Any]:
    given = {"state": states or None, "type": type_, "queue": queue, "group_key": group}
    wanted = {name: value for name, value in given.items() if value is not None}
    if bool(job_ids) == bool(wanted):
        raise UsageError("Name jobs by their ids, or else by --state, --type, --queue or --group.")
    return wanted


def _confirm(what: str, wanted: dict[str, Any], *, yes: bool) -> None:
    """Ask, where somebody is there to answer; raises UsageError where not."""
    if yes:
        return
    named = {"group_key": "group"}
    said = ", ".join(
        f"{named.get(name, name)} {'/'.join(value) if isinstance(value, list) else repr(value)}"
        for name, value in wanted.items()
    )
    if not sys.stdin.isatty():
        raise UsageError(f"{what} all jobs of {said}? Say --yes.")
    typer.confirm(f"{what} all jobs of {said}?", abort=True)


@on_scheduler
async def pause(scheduler: Scheduler, queue: Queue = None, type_: Type = None) -> None:
    """Start no more jobs of a queue, or of a type, until `resume`; those that run go on."""
    await scheduler.pause(**_lane(queue, type_))
    typer.echo(f"{_said(queue, type_)} is paused.")


@on_scheduler
async def resume(scheduler: Scheduler, queue: Queue = None, type_: Type = None) -> int:
    """Start jobs of a queue, or of a type, again; ends with 1 if it was not paused."""
    was_paused = await scheduler.resume(**_lane(queue, type_))
    what = "goes on" if was_paused else "was not paused"
    typer.echo(f"{_said(queue, type_)} {what}.", err=not was_paused)
    return 0 if was_paused else REFUSED


def _lane(queue: str | None, type_: str | None) -> dict[str, Any]:
    if (queue is None) == (type_ is None):
        raise UsageError("Name one --queue or one --type.")
    return {"queue": queue, "type": type_}


def _said(queue: str | None, type_: str | None) -> str:
    return f"The queue {queue!r}" if queue is not None else f"The type {type_!r}"


def period(text: str) -> float:
    """Return the seconds of "90", "90s", "15m", "12h", "30d" or "2w"; raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip())
    if found is None:
        raise UsageError(f"{text!r} is no time; write 90s, 15m, 12h, 30d or 2w")
    return float(found[1]) * _UNITS[found[2] or "s"]


@on_scheduler
async def prune(
    scheduler: Scheduler,
    older_than: Annotated[str, typer.Option(help="How long ago they ended: 12h, 30d, 2w.")],
    states: States = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Jobs to delete at most.")] = None,
) -> None:
    """Delete jobs that ended long ago: done, failed and cancelled ones, unless --state says which.

    What other jobs may still need is left.
    """
    wanted = states or sorted(TERMINAL)
    if not TERMINAL.issuperset(wanted):
        raise UsageError("--state takes done, failed or cancelled: others have not ended")
    deleted = await scheduler.prune(older_than=period(older_than), states=wanted, limit=limit)
    typer.echo(f"{deleted:,} jobs are deleted.")

"""`enqueue`: one job, by the name of its type."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Annotated, Any

import typer

from asyncjobq.cli.changing import period
from asyncjobq.cli.errors import UsageError
from asyncjobq.cli.place import AsJson, on_scheduler
from asyncjobq.cli.showing import print_json
from asyncjobq.scheduler import Scheduler


@on_scheduler
async def enqueue(
    scheduler: Scheduler,
    type_: Annotated[str, typer.Argument(metavar="TYPE", help="The handler's type.")],
    args: Annotated[
        str, typer.Argument(metavar="[ARGS]", help="A JSON object; - reads it from the input.")
    ] = "{}",
    given: Annotated[
        list[str] | None,
        typer.Option("--arg", "-a", metavar="NAME=VALUE", help="One more; JSON, or else a text."),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Else its handler's, or default.")] = None,
    name: Annotated[str | None, typer.Option(help="What people call it.")] = None,
    group: Annotated[str | None, typer.Option(help="Whose share of the slots it takes.")] = None,
    priority: Annotated[int | None, typer.Option(help="Smaller runs first; 100.")] = None,
    delay: Annotated[str | None, typer.Option(help="In how long it may start: 90s, 12h.")] = None,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="Else its handler's.")] = None,
    timeout: Annotated[str | None, typer.Option(help="Else its handler's: 90s, 12h.")] = None,
    unique_key: Annotated[str | None, typer.Option(help="One job at a time has it.")] = None,
    depends_on: Annotated[list[int] | None, typer.Option(help="A job to wait for.")] = None,
    as_json: AsJson = False,
) -> None:
    """Enqueue a job and print its id.

    With --app, its arguments are checked by its handler. With --json, the job's object.
    """
    options: dict[str, Any] = {
        "queue": queue,
        "name": name,
        "group_key": group,
        "priority": priority,
        "run_after": None if delay is None else timedelta(seconds=period(delay)),
        "max_attempts": max_attempts,
        "timeout": None if timeout is None else period(timeout),
        "unique_key": unique_key,
        "depends_on": depends_on or None,
    }
    chosen = {option: value for option, value in options.items() if value is not None}
    job = await scheduler.enqueue(type_, _arguments(args, given or []), **chosen)
    if as_json:
        print_json(job)
    else:
        typer.echo(job.id)


def _arguments(text: str, given: list[str]) -> dict[str, Any]:
    text = sys.stdin.read() if text == "-" else text
    try:
        args = json.loads(text)
    except ValueError as error:
        raise UsageError(f"ARGS is no JSON: {error}") from error
    if not isinstance(args, dict):
        raise UsageError(f'ARGS is a JSON object, {{"path": "a.png"}}, not {text[:50]!r}')
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise UsageError(f"--arg takes NAME=VALUE, not {one!r}")
        try:
            args[name] = json.loads(value)
        except ValueError:
            args[name] = value
    return args

"""Which database a command means, and which application, if it names one.

Every command of jobs takes the same options for that, so they are added to its own here. Nothing
is imported but the application that was typed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Concatenate, Final, ParamSpec, get_type_hints

import typer

from asyncjobq.cli.loading import scheduler_of
from asyncjobq.scheduler import Scheduler

P = ParamSpec("P")

_DATABASE: Final = "Which database"

App = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:OBJECT",
        help="A Scheduler, or a function that makes one; knows handlers and limits.",
        rich_help_panel=_DATABASE,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(help="Without --app; or set ASYNCJOBQ_URL.", rich_help_panel=_DATABASE),
]
Schema = Annotated[
    str | None, typer.Option(help="The tables' schema, with --url.", rich_help_panel=_DATABASE)
]
TablePrefix = Annotated[
    str, typer.Option(help="Their prefix, with --url.", rich_help_panel=_DATABASE)
]
AppDir = Annotated[
    Path,
    typer.Option(
        help="Where to look for MODULE first.",
        exists=True,
        file_okay=False,
        rich_help_panel=_DATABASE,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, whose keys stay.")]


def _places(
    app: App = None,
    url: Url = None,
    schema: Schema = None,
    table_prefix: TablePrefix = "",
    app_dir: AppDir = Path(),
) -> Scheduler:
    return scheduler_of(app, url, schema, table_prefix, app_dir)


def on_scheduler(
    function: Callable[Concatenate[Scheduler, P], Awaitable[int | None]],
) -> Callable[..., None]:
    """Make a command of a function that takes a scheduler, then its own options.

    What it returns is the exit code; None is 0.
    """
    hints = get_type_hints(function, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in list(inspect.signature(function).parameters.values())[1:]
    ]
    there = list(inspect.signature(_places, eval_str=True).parameters.values())
    keywords = {parameter.name for parameter in there}

    def command(**given: Any) -> None:
        place = {name: value for name, value in given.items() if name in keywords}
        mine = {name: value for name, value in given.items() if name not in keywords}
        code = asyncio.run(_on(_places(**place), function, mine))
        if code:
            raise typer.Exit(code)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=kind) for parameter in (*own, *there)]
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__annotations__ = {}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


async def _on(scheduler: Scheduler, function: Callable[..., Any], given: dict[str, Any]) -> Any:
    async with scheduler:
        return await function(scheduler, **given)

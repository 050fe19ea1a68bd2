"""The command that checks the tables, and mends them if it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy.exc import DBAPIError

from asyncjobq.check import CheckReport, Finding
from asyncjobq.check_repair import Mended, RepairReport
from asyncjobq.cli.errors import CommandError
from asyncjobq.cli.loading import scheduler_of
from asyncjobq.errors import AsyncJobQError
from asyncjobq.scheduler import Scheduler


class CannotCheckError(CommandError):
    """The tables could not be looked at."""

    exit_code = 2


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:OBJECT", help="A Scheduler, or a function that makes one."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended; workers may be running.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    examples: Annotated[int, typer.Option(min=0, help="How many to name of each.")] = 10,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds for which what workers do next may be undone.")
    ] = 60.0,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds that a check may take.")] = 300.0,
    url: Annotated[
        str | None, typer.Option(help="The database, without MODULE; or set ASYNCJOBQ_URL.")
    ] = None,
    schema: Annotated[str | None, typer.Option(help="The tables' schema, without MODULE.")] = None,
    table_prefix: Annotated[str, typer.Option(help="Their prefix, without MODULE.")] = "",
    app_dir: Annotated[
        Path, typer.Option(help="Where to look for MODULE first.", exists=True, file_okay=False)
    ] = Path(),
) -> None:
    """Check that the tables obey their rules, and say what breaks them.

    Only reads, unless --repair is given. Ends with 0 if all is well (after --repair: by now), with
    1 if something was found, and with 2 if it could not be checked, or not in time.
    """
    try:
        scheduler = scheduler_of(target, url, schema, table_prefix, app_dir)
        work = _look(scheduler, repair=repair, examples=examples, grace=grace, timeout=timeout)
        report = asyncio.run(work)
    except (AsyncJobQError, DBAPIError) as error:
        reason = getattr(error, "orig", None) or error
        raise CannotCheckError(f"The tables cannot be checked: {reason}") from error
    last = report.left if isinstance(report, RepairReport) else report
    typer.echo(json.dumps(_as_json(report)) if as_json else "\n".join(_lines(report)))
    raise typer.Exit(1 if last.findings else 2 if last.unfinished else 0)


async def _look(
    scheduler: Scheduler, *, repair: bool, **options: Any
) -> CheckReport | RepairReport:
    async with scheduler:
        return await (scheduler.repair if repair else scheduler.check)(**options)


def _as_json(report: CheckReport | RepairReport) -> dict[str, Any]:
    last = report.left if isinstance(report, RepairReport) else report
    return {"clean": last.clean, **asdict(report)}


def _lines(report: CheckReport | RepairReport) -> Iterator[str]:
    if isinstance(report, CheckReport):
        yield from _findings(report, "Found")
        return
    yield from _findings(report.found, "Found")
    yield from map(_mended, report.mended)
    if report.found.findings:
        yield from _findings(report.left, "Left")


def _findings(report: CheckReport, what: str) -> Iterator[str]:
    for finding in report.findings:
        yield f"{what}: {finding.rule} ({finding.count}). {_sentence(finding)}"
        if what == "Found":
            yield f"    {finding.mending or 'Nothing mends this by itself; look at them.'}"
    for rule in report.unfinished:
        yield f"Not checked, for lack of time: {rule}."
    if report.clean:
        yield f"All is well: {len(report.checked)} rules, no row breaks them."


def _sentence(finding: Finding) -> str:
    names = _named(finding.examples)
    more = finding.count - len(finding.examples)
    who = f"{names} and {more} more" if names and more else names or f"{more} of them"
    return f"Each of these {finding.problem}: {who}."


def _named(examples: Iterable[int | str]) -> str:
    return ", ".join(map(str, examples))


def _mended(mended: Mended) -> str:
    return f"Mended: {mended.rule} ({mended.count}). {mended.mending}"

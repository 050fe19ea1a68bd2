"""`show` and `graph`: one job, why it is where it is, and what is around it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from asyncjobq.attempts import Attempt
from asyncjobq.cli.place import AsJson, on_scheduler
from asyncjobq.cli.showing import (
    cell,
    console,
    escaped,
    moment,
    plain,
    print_json,
    state_cell,
    table,
)
from asyncjobq.explanation import Explanation
from asyncjobq.graph import Graph
from asyncjobq.job import Job
from asyncjobq.neighbourhood import Neighbourhood
from asyncjobq.reasons import duration
from asyncjobq.scheduler import Scheduler
from asyncjobq.states import Kind

LONGEST: Final = 2000
"""Characters of arguments, results and the like that are shown."""

JobId = Annotated[int, typer.Argument(metavar="ID", min=0, help="The job's id.")]


@on_scheduler
async def show(
    scheduler: Scheduler,
    job_id: JobId,
    tracebacks: Annotated[
        bool, typer.Option("--tracebacks", help="Of all attempts that did not succeed.")
    ] = False,
    neighbours: Annotated[int, typer.Option(min=0, help="How many of each kind to name.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show a job: why it is where it is, its attempts, and what is around it in its graph.

    With --json an object of `job`, `explanation` (with `reasons`), `attempts` and `neighbours`.
    """
    explanation = await scheduler.explain(job_id)
    attempts = await scheduler.attempts(job_id, limit=100)
    around = await scheduler.neighbours(job_id, limit=neighbours)
    if as_json:
        parts = plain(explanation)
        job = parts.pop("job")
        around_it = {"attempts": attempts, "neighbours": around}
        print_json({"job": job, "explanation": parts, **around_it})
        return
    out = console()
    _show_reasons(out, explanation)
    _show_values(out, explanation.job)
    _show_attempts(out, attempts, tracebacks=tracebacks)
    _show_neighbours(out, around)


def _show_reasons(out: Console, explanation: Explanation) -> None:
    first, *others = str(explanation).splitlines()
    out.print(Text(escaped(first), style="bold"), soft_wrap=True)
    for line in others:
        out.print(Text(f"  {escaped(line)}"), soft_wrap=True)


def _show_values(out: Console, job: Job[Any]) -> None:
    out.print()
    for name, value in _values(job):
        out.print(Text(f"{name:<12}", style="dim").append(value), soft_wrap=True)


def _values(job: Job[Any]) -> Iterator[tuple[str, str]]:
    given: dict[str, Any] = {
        "args": job.args,
        "result": job.result,
        "progress": job.progress,
        "checkpoint": job.checkpoint,
        "meta": job.meta,
    }
    yield "created", moment(job.created_at)
    for name in ("started", "finished"):
        if value := moment(getattr(job, f"{name}_at")):
            yield name, value
    if job.started_at is not None and job.finished_at is not None:
        yield "took", duration((job.finished_at - job.started_at).total_seconds())
    group = escaped(f"{job.group_key!r}, weight {job.weight:g}, ") if job.group_key else ""
    yield "order", f"{group}priority {job.priority}"
    if job.unique_key is not None:
        yield "unique key", escaped(repr(job.unique_key))
    for name, value in given.items():
        if value is not None:
            text = escaped(json.dumps(value, ensure_ascii=False))
            yield name, text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _show_attempts(out: Console, attempts: list[Attempt], *, tracebacks: bool) -> None:
    if not attempts:
        return
    out.print()
    made = table("Attempt", "Ended", "How", "After", "Error", "Worker", right=["Attempt"])
    for one in attempts:
        took = ""
        if one.started_at is not None:
            took = duration((one.finished_at - one.started_at).total_seconds())
        error = " ".join(part for part in (one.error_type, one.message) if part)
        ended = Text(moment(one.finished_at))
        number, how = Text(str(one.attempt)), Text(str(one.ending))
        made.add_row(number, ended, how, Text(took), cell(error), cell(one.worker))
    out.print(made)
    for one in attempts if tracebacks else ():
        if one.traceback:
            out.print(Text(f"\nAttempt {one.attempt}", style="bold"))
            out.print(Text(escaped(one.traceback, lines=True)), soft_wrap=True)


def _show_neighbours(out: Console, around: Neighbourhood) -> None:
    kinds: dict[str, Iterable[Job[Any]]] = {
        "is in": [around.parent] if around.parent else [],
        "depends on": around.upstreams,
        "awaited by": around.dependants,
        "holds": around.children,
    }
    if not any(kinds.values()):
        return
    out.print()
    for kind, found in kinds.items():
        for job in found:
            line = Text(f"{kind:<12}", style="dim").append(f"{job.id}  ", style="not dim")
            line.append_text(cell(job.name or job.type, limit=60)).append("  ")
            out.print(line.append_text(state_cell(job.state)), soft_wrap=True)
    if around.cut:
        out.print(Text("There are more; --neighbours says how many are shown.", style="dim"))


class Language(StrEnum):
    """How a graph is drawn."""

    TREE = "tree"
    MERMAID = "mermaid"
    DOT = "dot"


@on_scheduler
async def graph(
    scheduler: Scheduler,
    job_id: JobId,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Jobs at most.")] = 200,
    language: Annotated[Language, typer.Option("--as", help="How to draw it.")] = Language.TREE,
    as_json: AsJson = False,
) -> None:
    """Draw the graph that a job belongs to; what is nearest, if it is large.

    With --json an object of `jobs`, `edges` and `cut` (whether there are more).
    """
    found = await scheduler.graph(job_id, limit=limit)
    if as_json:
        print_json(found)
    elif language is Language.MERMAID:
        typer.echo(escaped(found.to_mermaid(), lines=True), nl=False)
    elif language is Language.DOT:
        typer.echo(escaped(found.to_dot(), lines=True), nl=False)
    else:
        _draw(console(), found, job_id)


def _draw(out: Console, found: Graph, job_id: int) -> None:
    known = {job.id: job for job in found.jobs}
    waits: dict[int, list[str]] = {}
    for edge in found.edges:
        rule = " (also if it fails)" if edge.on_failure == "run" else ""
        waits.setdefault(edge.job_id, []).append(f"{edge.depends_on_id}{rule}")
    root = Tree(Text("jobs", style="dim"), hide_root=True, guide_style="dim")
    branches: dict[int | None, Tree] = {None: root}
    for job in _parents_first(found.jobs):
        above = branches[job.parent_id if job.parent_id in known else None]
        branches[job.id] = above.add(_node(job, waits.get(job.id, []), here=job.id == job_id))
    out.print(root, soft_wrap=True)
    if found.cut:
        out.print(Text("There are more; --limit says how many are drawn.", style="dim"))


def _parents_first(jobs: Iterable[Job[Any]]) -> list[Job[Any]]:
    """Return jobs so that each comes after what it is in, else by id."""
    jobs = list(jobs)
    known = {job.id for job in jobs}
    below: dict[int | None, list[Job[Any]]] = {}
    for job in jobs:
        below.setdefault(job.parent_id if job.parent_id in known else None, []).append(job)
    level, found = below.get(None, []), list[Job[Any]]()
    while level:
        found += level
        level = [child for job in level for child in below.get(job.id, [])]
    return found


def _node(job: Job[Any], waits: list[str], *, here: bool) -> Text:
    line = Text(f"{job.id} ", style="bold" if here else "")
    line.append_text(cell(job.name or job.type, limit=60))
    line.append("/ " if job.kind is Kind.CONTAINER else " ").append_text(state_cell(job.state))
    if waits:
        more = f", and {len(waits) - 10} more" if len(waits) > 10 else ""
        line.append(f"  after {', '.join(waits[:10])}{more}", style="dim")
    return line

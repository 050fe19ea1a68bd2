"""What the demo shows: the progress of its jobs, and the report as tables."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from asyncjobq.job import Job
from asyncjobq.states import TERMINAL, State


def progress_bar(console: Console) -> Progress:
    """Return the bar, whose task has the text of `states_in_words` in its field `states`."""
    return Progress(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[states]:<24}"),
        TimeElapsedColumn(),
        console=console,
        expand=True,
    )


def states_in_words(states: Mapping[State, int]) -> str:
    """Say how many jobs are in which state that is not an end."""
    return ", ".join(
        f"{states[state]} {state}" for state in State if state not in TERMINAL and states.get(state)
    )


def counted(count: int, word: str) -> str:
    """Return a number and its word, in the plural if it is one."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def draw_report(console: Console, report: Mapping[str, Any], root: Path) -> None:
    """Print what the report job found."""
    side_by_side = Table.grid(padding=(0, 4))
    side_by_side.add_row(_folders(report["folders"][:10]), _imports(report["imports"]))
    console.print(side_by_side)
    unread = f"; {len(report['problems'])} cannot be parsed:" if report["problems"] else "."
    console.print(
        f"{counted(report['files'], 'file')}, {counted(report['lines'], 'line')}, "
        f"{_size(report['bytes'])}; "
        f"{_copies(report['copies'])}{unread}",
        highlight=False,
    )
    for problem in report["problems"][:3]:
        text = Text(problem.removeprefix(f"{root}{os.sep}"), style="dim")
        console.print(text, no_wrap=True, overflow="ellipsis")


def draw_ends(console: Console, jobs: Sequence[Job[Any]], seconds: float) -> None:
    """Print how the jobs ended, and how often they were started for that."""
    ends = Counter(str(job.state) for job in jobs)
    console.print(
        f"{len(jobs):,} jobs in {seconds:.1f} s, {len(jobs) / seconds:,.0f} a second: "
        + ", ".join(f"{count:,} {state}" for state, count in ends.items()),
        style="bold green",
        highlight=False,
    )
    again = sum(job.attempt > 1 for job in jobs)
    if again:
        starts = sum(job.attempt for job in jobs)
        console.print(f"{again:,} of them ran again: {starts:,} starts, {len(jobs):,} ends.")


def _folders(folders: list[Mapping[str, Any]]) -> Table:
    table = Table("Folder", title="Biggest folders", title_justify="left")
    for column in ("Files", "Lines", "Size"):
        table.add_column(column, justify="right")
    for one in folders:
        numbers = f"{one['files']:,}", f"{one['lines']:,}", _size(one["bytes"])
        table.add_row(one["folder"], *numbers)
    return table


def _imports(imports: list[tuple[str, int]]) -> Table:
    table = Table("Module", title="Most imported", title_justify="left")
    table.add_column("Files", justify="right")
    for module, count in imports:
        table.add_row(module, f"{count:,}")
    return table


def _copies(count: int) -> str:
    return "1 is a copy of another" if count == 1 else f"{count:,} are copies of others"


def _size(number: int) -> str:
    if number < 1000:
        return f"{number} B"
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number / 1e3:.1f} kB"

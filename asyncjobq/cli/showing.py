"""How values are shown: tables and lines for people, JSON for programs.

What comes from the database may be anybody's. It is never read as markup, and what would act on a
terminal (control characters, escape sequences, changes of direction) is written out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncjobq.codec import gist
from asyncjobq.job import Job
from asyncjobq.states import State

COLORS: Final = {
    State.DONE: "green",
    State.FAILED: "red",
    State.CANCELLED: "dim",
    State.LEASED: "cyan",
    State.RUNNING: "cyan",
    State.READY: "yellow",
}
_WIDE: Final = 10_000


def console() -> Console:
    """Return where results go; lines are as long as they are where nobody looks at them."""
    found = Console(highlight=False, markup=False, emoji=False)
    if not found.is_terminal:
        found.width = _WIDE
    return found


def escaped(value: object, *, lines: bool = False) -> str:
    """Return a text without anything that acts on a terminal; with `lines`, line ends stay."""
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else _written_out(c) for c in str(value)
    )


def _written_out(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


def cell(value: object, *, style: str = "", limit: int = 200) -> Text:
    """Return what stands in a table or a line: "" for None, at most so many characters."""
    text = "" if value is None else escaped(value)
    return Text(text if len(text) <= limit else f"{text[:limit]}…", style=style)


def state_cell(state: State | None) -> Text:
    """Return a state in its color."""
    return Text("gone") if state is None else Text(str(state), style=COLORS.get(state, ""))


def moment(value: datetime | None) -> str:
    """Return a time in UTC, to the second."""
    return "" if value is None else f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table; the columns in `right` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def table_of_jobs(jobs: Iterable[Job[Any]]) -> Table:
    """Return jobs as a table."""
    columns = ("Id", "Type", "State", "Queue", "Group", "Attempt", "Created", "Error")
    made = table(*columns, right=["Id", "Attempt"])
    for job in jobs:
        made.add_row(*row_of(job))
    return made


def row_of(job: Job[Any]) -> list[Text]:
    """Return what is shown of a job in a line."""
    name = job.type if job.name in (None, job.type) else f"{job.type} ({job.name})"
    tries = "" if job.max_attempts is None else f"/{job.max_attempts}"
    return [
        Text(str(job.id)),
        cell(name, limit=60),
        state_cell(job.state),
        cell(job.queue, limit=30),
        cell(job.group_key, limit=40),
        Text(f"{job.attempt}{tries}"),
        Text(moment(job.created_at)),
        cell(job.error and gist(job.error), limit=80),
    ]


# -- for programs -------------------------------------------------------------------------------


def print_json(value: Any, *, one_line: bool = False) -> None:
    """Print a value as JSON, in ASCII."""
    print(json.dumps(plain(value), indent=None if one_line else 2, allow_nan=False), flush=True)  # noqa: T201


def plain(value: Any) -> Any:
    """Return a value as JSON has it: times as ISO 8601 in UTC, what has no end as null."""
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value) if field.name != "existing")
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(part) for part in value]
    return _one(value)


def _one(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value

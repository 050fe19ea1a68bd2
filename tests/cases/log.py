"""What handlers do, written to a file outside the library's tables and transactions."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One thing that happened in a handler; `at` is the machine's monotonic clock."""

    label: str
    attempt: int
    pid: int
    event: str
    at: float
    detail: str = ""


class Log:
    """A file to which any number of processes append whole lines."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, label: str, attempt: int, event: str, detail: str = "") -> None:
        """Append one entry."""
        entry = Entry(label, attempt, os.getpid(), event, time.monotonic(), detail)
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def entries(
        self, event: str | None = None, *, label: str | None = None, pid: int | None = None
    ) -> list[Entry]:
        """Return what was written so far, in order, as far as it matches."""
        lines = self.path.read_text().splitlines()
        return [
            entry
            for entry in (Entry(*json.loads(line)) for line in lines)
            if event in (None, entry.event)
            and label in (None, entry.label)
            and pid in (None, entry.pid)
        ]

    def starts(self, label: str | None = None, *, pid: int | None = None) -> list[Entry]:
        """Return the starts of handlers."""
        return self.entries("start", label=label, pid=pid)

    def ends(self, label: str | None = None, *, pid: int | None = None) -> list[Entry]:
        """Return the ends of handlers that were reached."""
        return self.entries("end", label=label, pid=pid)

    def running(self, pid: int) -> set[str]:
        """Return the labels whose handlers have started and not ended in a process."""
        return labels(self.starts(pid=pid)) - labels(self.ends(pid=pid))


def labels(entries: Iterable[Entry]) -> set[str]:
    """Return the labels of entries."""
    return {entry.label for entry in entries}


def by_label(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return entries by label."""
    found: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.label].append(entry)
    return found

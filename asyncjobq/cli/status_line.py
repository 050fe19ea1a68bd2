"""The last line of a worker's terminal: what runs now, and how the others ended."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from types import TracebackType
from typing import Final, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from asyncjobq import events
from asyncjobq.cli.showing import escaped
from asyncjobq.clock import monotonic
from asyncjobq.reasons import duration
from asyncjobq.scheduler import Scheduler

PER_SECOND: Final = 4
_OVER: Final = (events.Retried, events.Snoozed, events.Interrupted, events.LeaseLost)


class StatusLine(logging.Handler):
    """Draws the line while it is entered, and writes log records above it."""

    def __init__(self, scheduler: Scheduler, console: Console) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._console = console
        self._spinner = Spinner("dots", style="cyan")
        self._running: dict[int, tuple[str, float]] = {}
        self._ended: Counter[str] = Counter()
        self._live = Live(
            self,
            console=console,
            refresh_per_second=PER_SECOND,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # else it goes where its user has sent it
        )

    def __enter__(self) -> Self:
        self._unsubscribe = self._scheduler.subscribe(self._note)
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        self._unsubscribe()
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record above the line."""
        try:
            text = escaped(self.format(record), lines=True)
            self._console.print(Text(text), soft_wrap=True)
        except Exception:
            self.handleError(record)

    def _note(self, event: events.Event) -> None:
        """Take over what an event says; also of jobs that others' calls have ended."""
        if isinstance(event, events.Leased):
            self._running[event.job_id] = (event.type, monotonic())
        elif isinstance(event, events.Succeeded | events.Failed | events.Cancelled):
            name = {"Succeeded": "done"}.get(type(event).__name__, type(event).__name__.lower())
            ours = self._running.pop(event.job_id, None) is not None
            self._ended[name] += ours or event.worker_id == self._scheduler.settings.worker_id
        elif isinstance(event, _OVER):
            self._running.pop(event.job_id, None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        line = Table.grid(padding=(0, 1))
        line.add_row(self._spinner, Text(self.text(), no_wrap=True, overflow="ellipsis"))
        yield line

    def text(self) -> str:
        """Return what the line says."""
        settings, running = self._scheduler.settings, dict(self._running)
        parts = [settings.worker_id, f"{len(running)}/{settings.concurrency} run"]
        parts += [f"{self._ended[name]:,} {name}" for name in ("done", "failed", "cancelled")]
        if running:
            job_id, (name, begun) = min(running.items(), key=lambda item: item[1][1])
            parts.append(f"{name} {job_id} for {duration(monotonic() - begun)}")
        return escaped(" · ".join(parts))

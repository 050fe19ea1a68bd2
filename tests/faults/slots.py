"""The workers of a run: always the same number, whatever happens to them."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cases.faked_clocks import clocks_can_be_faked, faked_clock
from cases.workers import WorkerProcess
from faults import program
from faults.program import CRASHED, Settings

SLOTS: Final = 4
"""Workers at a time."""
SKEWED: Final = 3
"""The slot whose workers have wrong clocks, where that can be done."""


@dataclass
class Slot:
    """One place for a worker; whenever one ends, another takes its place."""

    number: int
    worker: WorkerProcess | None = None
    terminated: set[int] = field(default_factory=set)
    """Process ids that were told to end."""
    killed: set[int] = field(default_factory=set)


@dataclass
class Slots:
    """All places, and all workers that there were."""

    url: str
    log: Path
    folder: Path
    draw: random.Random
    skewed: bool
    """Whether some have wrong clocks."""
    places: list[Slot] = field(default_factory=lambda: [Slot(number) for number in range(SLOTS)])
    workers: list[WorkerProcess] = field(default_factory=list)
    crashes: int = 0
    problems: list[str] = field(default_factory=list)
    closed: bool = False

    async def keep_full(self) -> None:
        """Start a worker in each slot, and another whenever one has ended, until closed."""
        while not self.closed:
            for slot in self.places:
                if slot.worker is None or slot.worker.exit_code is not None:
                    self._note_end(slot)
                    slot.worker = self._start(slot)
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """End all workers."""
        self.closed = True
        for slot in self.places:
            if slot.worker is not None:
                slot.worker.kill()

    def surprises(self) -> list[str]:
        """Return what the library did not expect, of the workers' output."""
        met = [worker for worker in self.workers if worker.surprises()]
        return [f"{worker.id} was surprised:\n{worker.output()[-3000:]}" for worker in met]

    def _start(self, slot: Slot) -> WorkerProcess:
        name = f"worker-{len(self.workers)}"
        environment = None
        if slot.number == SKEWED and self.skewed and clocks_can_be_faked():
            environment = faked_clock(f"{self.draw.randint(-3600, 3600):+d}s")
        settings = Settings(self.url, str(self.log), name)
        worker = WorkerProcess(settings, self.folder / f"{name}.log", environment, program)
        self.workers.append(worker)
        return worker

    def _note_end(self, slot: Slot) -> None:
        worker = slot.worker
        if worker is None or worker.pid in slot.killed:
            return
        code = worker.exit_code
        if code == CRASHED:
            self.crashes += 1
        # Before it serves, SIGTERM ends it as it ends any program.
        elif not (code in (0, -signal.SIGTERM) and worker.pid in slot.terminated):
            last = "\n".join(worker.output().splitlines()[-15:])
            self.problems.append(f"{worker.id} ended by itself with {code}:\n{last}")

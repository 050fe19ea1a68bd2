"""Runs the examples and the command line in processes of their own, with nothing in their home."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
COMMAND: Final = ("-m", "asyncjobq")
START_WITHIN: Final = 30.0
EXIT_WITHIN: Final = 5.0
BAD_SIGNS: Final = (
    "Traceback",
    "ResourceWarning",
    "Task was destroyed",
    "different loop",
    "never retrieved",
    "never awaited",
)

T = TypeVar("T")


def wait_for(look: Callable[[], T | None], what: str, within: float = START_WITHIN) -> T:
    """Return the first answer of `look` that is true; fails after a time."""
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.02)
    return found


def _copy(terminal: int, log: Path) -> None:
    """Copy what is written to a terminal, until nobody has it open any more."""
    with log.open("ab", buffering=0) as output:
        while True:
            try:
                read = os.read(terminal, 65536)
            except OSError:
                return
            if not read:
                return
            output.write(read)


@dataclass
class Program:
    """A program that runs beside the test."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        """What it has printed and logged."""
        return self.log.read_text(errors="replace")

    def wait_for_output(self, text: str) -> None:
        """Wait until the program has printed or logged this."""

        def look() -> bool:
            assert self.process.poll() is None, self.output
            return text in self.output

        wait_for(look, f"output {text!r}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def exit_code(self, within: float = EXIT_WITHIN) -> int:
        """Wait for its end, which must come soon."""
        return self.process.wait(timeout=within)

    def check_output(self) -> None:
        """Fail if it said anything that a well-behaved program does not say."""
        assert [sign for sign in BAD_SIGNS if sign in self.output] == [], self.output


class Place:
    """A home, a current directory and a folder for temporary files, all empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.current = folder / "current"
        self.temporary = folder / "temporary"
        for made in (self.home, self.current, self.temporary):
            made.mkdir()

    @property
    def left_behind(self) -> list[Path]:
        """What programs have left in any of them."""
        return [*self.home.iterdir(), *self.current.iterdir(), *self.temporary.iterdir()]

    def run(
        self, *arguments: str, within: float = 60.0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments to its end, as its users do."""
        return subprocess.run(
            [sys.executable, "-W", "always::ResourceWarning", *arguments],
            cwd=self.current,
            env=self._environment(variables),
            capture_output=True,
            text=True,
            timeout=within,
            check=False,
        )

    @contextmanager
    def running(self, *arguments: str, log: str = "output", **variables: str) -> Iterator[Program]:
        """Run Python in its development mode beside the block, and kill it if it is left.

        `log` is the name of a file for its output, where several run at one time.
        """
        told = self.folder / log
        with told.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-X", "dev", *arguments],
                cwd=self.current,
                env=self._environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                yield Program(process, told)
            finally:
                process.kill()
                process.wait()

    @contextmanager
    def on_terminal(self, *arguments: str, **variables: str) -> Iterator[Program]:
        """Run Python as `running` does, on a terminal, whose output is copied into the log."""
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 200))
        log = self.folder / "output"
        log.touch()
        process = subprocess.Popen(
            [sys.executable, "-X", "dev", *arguments],
            cwd=self.current,
            env=self._environment({"TERM": "xterm", **variables, "COLUMNS": "200"}),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        copying = threading.Thread(target=_copy, args=(ours, log))
        copying.start()
        try:
            yield Program(process, log)
        finally:
            process.kill()
            process.wait()
            copying.join()
            os.close(ours)

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        own = {"HOME": str(self.home), "TMPDIR": str(self.temporary), "COLUMNS": "100"}
        return {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1", **variables}

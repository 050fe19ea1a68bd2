"""Handlers that run in processes of their own, which find them in this module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from asyncjobq import Cancel, Fail, Retry, Snooze


@dataclass
class Point:
    x: int
    y: int


class OwnError(ValueError):
    """One that cannot be made of its message alone."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def add(a: int, b: int = 1) -> int:
    return a + b


def mirror(point: Point) -> Point:
    return Point(point.y, point.x)


def pid() -> int:
    return os.getpid()


def spin(file: str) -> NoReturn:
    """Say who is at work, and start another process; never return."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    unfinished = Path(file + ".part")
    unfinished.write_text(f"{os.getpid()} {other.pid}")
    unfinished.rename(file)
    while True:
        pass


def hold_lock(file: str) -> NoReturn:
    """Hold Python's lock for hours: no other thread of the process can run."""
    unfinished = Path(file + ".part")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(file)
    _ = 3 ** (10**9)
    raise AssertionError


def wait_for(file: str, answer: str) -> str:
    """Say who is at work; return when the answer is there."""
    Path(file).write_text(str(os.getpid()))
    while not Path(answer).exists():
        time.sleep(0.01)
    return "in spite of it"


def fail_deeply() -> NoReturn:
    try:
        _ = {}["missing"]
    except KeyError as error:
        raise OwnError(7, "no such thing") from error


ERRORS: dict[str, BaseException] = {
    "own": OwnError(1, "one"),
    "value": ValueError("wrong"),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "group": ExceptionGroup("several", [ValueError("wrong"), OSError(2, "gone")]),
    "retry": Retry("later", after=30),
    "snooze": Snooze(60),
    "fail": Fail("for good"),
    "cancel": Cancel("no more"),
}


def raise_error(name: str) -> NoReturn:
    raise ERRORS[name]


def die(how: str) -> Any:
    if how == "exit":
        os._exit(3)
    if how == "close":
        os.closerange(3, 1000)
        return None
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def say(text: str) -> None:
    print(text)


def unstorable() -> object:
    return {1, 2}


class Tools:
    @staticmethod
    def double(n: int) -> int:
        return 2 * n

    def method(self) -> None: ...

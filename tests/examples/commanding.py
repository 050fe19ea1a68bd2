"""The command line, run in the test's process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from asyncjobq.cli import main


@dataclass(frozen=True)
class Said:
    """What a command has printed, and its exit code."""

    code: Any
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON that it has printed."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """The lines of its output, without what pads them."""
        return [line.rstrip() for line in self.out.splitlines()]


class Command:
    """Runs `asyncjobq` on one database."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Said:
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["asyncjobq", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        printed = self._capsys.readouterr()
        return Said(exit_.value.code or 0, printed.out, printed.err)

    def good(self, *arguments: object) -> Said:
        """Run what is to end with 0 and to complain of nothing."""
        said = self(*arguments)
        assert (said.code, said.err) == (0, ""), said
        return said

"""Count the tests per backend, and refuse unexplained skips where a backend is required."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Final

import pytest

from servers import BACKENDS, Server, Servers

BACKENDS_USED = pytest.StashKey[set[str]]()
CAPABILITY_SKIP = pytest.StashKey[bool]()
NO_BACKEND: Final = "none"
NOTED: Final = "backends"
"""The attribute of a report: the backends of its test, and whether a capability skips it there."""
ASKED_FOR: Final = "servers"
"""The last words of a process of pytest-xdist: what it found of each backend."""


def backends_of(item: pytest.Item) -> set[str]:
    """Return the backends that a test runs on."""
    noted: set[str] = item.stash.setdefault(BACKENDS_USED, set())
    parameters: Mapping[str, str] = getattr(getattr(item, "callspec", None), "params", {})
    return {*noted, parameters["backend_name"]} if "backend_name" in parameters else set(noted)


def note_backend(item: pytest.Item, backend: str) -> None:
    """Count a test as one of a backend's."""
    item.stash.setdefault(BACKENDS_USED, set()).add(backend)


@dataclass(eq=False)  # pytest puts plugins into sets
class BackendReport:
    """The plugin; it reads the servers when the session ends.

    Under pytest-xdist the tests run in other processes, so what is counted travels in their
    reports, and what is known of the servers in what a process says last.
    """

    servers: Servers
    outcomes: dict[tuple[str, str], str] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        explained = item.stash.get(CAPABILITY_SKIP, False)
        noted = dict.fromkeys(backends_of(item) or {NO_BACKEND}, explained)
        setattr(report, NOTED, noted)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        noted: dict[str, bool] = getattr(report, NOTED, {})
        for backend, explained in noted.items():
            self._count(backend, report, explained=explained)

    def _count(self, backend: str, report: pytest.TestReport, *, explained: bool) -> None:
        key = (report.nodeid, backend)
        if report.failed:
            self.outcomes[key] = "failed"
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.outcomes.setdefault(key, "skipped")
            if backend in self.servers.required() and not explained:
                self.unexplained.append(f"{report.nodeid}: {_reason(report)}")
        elif report.when == "call":
            self.outcomes.setdefault(key, "passed")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for backend, found in self.servers.found().items():
            self.told[backend] = _described(found)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[ASKED_FOR] = self.told
        elif self.unexplained and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take what a process of pytest-xdist found; one that crashed says nothing."""
        self.told.update(getattr(node, "workeroutput", {}).get(ASKED_FOR, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("tests per backend")
        counts: Counter[tuple[str, str]] = Counter(
            (backend, outcome) for (_, backend), outcome in self.outcomes.items()
        )
        for backend in (*BACKENDS, NO_BACKEND):
            terminalreporter.write_line(self._line(backend, counts))
        if self.unexplained:
            terminalreporter.section("skipped on a required backend", red=True)
            for line in self.unexplained:
                terminalreporter.write_line(line)

    def _line(self, backend: str, counts: Counter[tuple[str, str]]) -> str:
        numbers = ", ".join(
            f"{counts[backend, outcome]:4d} {outcome}"
            for outcome in ("passed", "failed", "skipped")
        )
        return f"{backend:<11}{numbers}   {self.told.get(backend, '')}".rstrip()


def _described(found: Server | Exception) -> str:
    if isinstance(found, Server):
        return f"{found.version} ({found.origin})"
    return str(found)


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return str(report.longrepr)

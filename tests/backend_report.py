"""Count the tests per backend, and refuse unexplained skips where a backend is required."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

import pytest

from servers import BACKENDS, Server, Servers

BACKENDS_USED = pytest.StashKey[set[str]]()
CAPABILITY_SKIP = pytest.StashKey[bool]()
NO_BACKEND = "none"


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
    """The plugin; it reads the servers when the session ends."""

    servers: Servers
    outcomes: dict[tuple[str, str], str] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        for backend in backends_of(item) or {NO_BACKEND}:
            self._count(item, backend, report)
        return report

    def _count(self, item: pytest.Item, backend: str, report: pytest.TestReport) -> None:
        key = (item.nodeid, backend)
        if report.failed:
            self.outcomes[key] = "failed"
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.outcomes.setdefault(key, "skipped")
            required = backend in self.servers.required()
            if required and not item.stash.get(CAPABILITY_SKIP, False):
                self.unexplained.append(f"{item.nodeid}: {_reason(report)}")
        elif report.when == "call":
            self.outcomes.setdefault(key, "passed")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexplained and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

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
        return f"{backend:<11}{numbers}   {self._server(backend)}".rstrip()

    def _server(self, backend: str) -> str:
        found = self.servers.found().get(backend)
        if isinstance(found, Server):
            return f"{found.version} ({found.origin})"
        return "" if found is None else str(found)


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return str(report.longrepr)

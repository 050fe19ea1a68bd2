"""Break a copy of the library in one place after the other, and demand that a test notices.

    python tests/sabotage/run.py [--backend NAME]... [--jobs N] [WORDS OF A BREAKAGE'S NAME]...

A breakage must turn one of its tests red on every backend that it concerns, and leave another one
green. Before that, all these tests must pass on the unbroken copy. Backends that are not on this
machine are left out, unless ASYNCJOBQ_REQUIRE_BACKENDS names them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from sabotage.breakages import ALL, BREAKAGES, NONE, Breakage  # noqa: E402
from servers import Servers, url_variable  # noqa: E402
from throwaway import MissingServerError  # noqa: E402

LONGEST: Final = 180
"""Seconds for the tests of one breakage; they bound themselves long before."""


class Copy:
    """A copy of the project, in which tests run with the copied library."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = {**environment, "PYTHONPATH": str(folder)}
        folder.mkdir()
        for name in ("asyncjobq", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", "sabotage")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        self._check_import()

    def _check_import(self) -> None:
        ask = [sys.executable, "-c", "import asyncjobq; print(asyncjobq.__file__)"]
        found = subprocess.check_output(ask, cwd=self._folder, env=self._environment, text=True)
        if not Path(found.strip()).is_relative_to(self._folder):
            raise SystemExit(f"the tests would run with {found.strip()} and not with the copy")

    @contextmanager
    def broken(self, breakage: Breakage) -> Iterator[None]:
        """Have this breakage in the copy."""
        path = self._folder / "asyncjobq" / breakage.file
        text = path.read_text()
        if text.count(breakage.before) != 1:
            raise SystemExit(f"{breakage.name!r}: its text is not once in {breakage.file}")
        path.write_text(text.replace(breakage.before, breakage.after))
        try:
            yield
        finally:
            path.write_text(text)

    def results(
        self,
        tests: Iterable[str],
        backends: Sequence[str],
        patience: float = 10,
        longest: float = LONGEST,
    ) -> dict[str, set[str]]:
        """Run tests; return which outcomes each had: `passed`, `failed` or `skipped`.

        The keys are a test as it is named here, "@", and a backend or "none".
        """
        report = self._folder / "report.xml"
        report.unlink(missing_ok=True)
        nodes = [f"tests/{placed(test)}" for test in dict.fromkeys(tests)]
        wanted = [name for name in ALL if name in backends]
        others = " and ".join(f"not {name}" for name in ALL if name not in wanted)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "-k", others, *nodes]
        with (self._folder / "log").open("w") as log:
            try:
                subprocess.run(
                    command,
                    cwd=self._folder,
                    env={**self._environment, "ASYNCJOBQ_TEST_PATIENCE": str(patience)},
                    stdout=log,
                    stderr=log,
                    timeout=longest,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {}
        return _outcomes(report) if report.exists() else {}

    def log(self) -> str:
        """Return the end of what pytest said last."""
        return "\n".join((self._folder / "log").read_text().splitlines()[-40:])


def placed(test: str) -> str:
    """Return a test with its folder, which is `conformance` unless it says another."""
    return test if "/" in test else f"conformance/{test}"


def _outcomes(report: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  our own report
        outcome = next(
            (word for tag, word in _TAGS.items() if case.find(tag) is not None), "passed"
        )
        folder, *place = case.get("classname", "").removeprefix("tests.").split(".")
        if not place:  # a file that could not be collected
            continue
        name, _, parameters = case.get("name", "").partition("[")
        backend = parameters.rstrip("]").split("-")[0]
        backend = backend if backend in ALL else "none"
        test = "::".join((f"{folder}/{place[0]}.py", *place[1:], name))
        found.setdefault(f"{test}@{backend}", set()).add(outcome)
    return found


_TAGS: Final = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def verdict(breakage: Breakage, backend: str, results: dict[str, set[str]]) -> str:
    """Say what came of a breakage on one backend: `red` is what is wanted."""
    if not results:
        return "HUNG"
    if results.get(f"{placed(breakage.unharmed)}@{backend}") != {"passed"}:
        return "SMASHED"
    tests = map(placed, breakage.tests)
    caught = any("failed" in results.get(f"{test}@{backend}", ()) for test in tests)
    return "red" if caught else "GREEN"


def check_unbroken(copy: Copy, chosen: Sequence[Breakage], backends: Sequence[str]) -> None:
    """Exit unless all tests pass without any breakage."""
    tests = [test for breakage in chosen for test in (*breakage.tests, breakage.unharmed)]
    results = copy.results(tests, backends, longest=LONGEST * len(chosen))
    failed = sorted(name for name, outcomes in results.items() if "failed" in outcomes)
    if failed or not results:
        raise SystemExit(f"without any breakage, {failed or 'nothing'} fails:\n{copy.log()}")


def servers_of(wanted: Sequence[str], servers: Servers) -> Iterator[tuple[str, str]]:
    """Yield the backends that are on this machine, with their URLs."""
    for backend in wanted:
        try:
            server = servers.get(backend)
        except MissingServerError as error:
            if backend in servers.required():
                raise SystemExit(str(error)) from error
            print(f"left out: {error}")
            continue
        url = server.url.render_as_string(hide_password=False) if server.url else ""
        yield backend, url


def run(copies: Sequence[Copy], chosen: Sequence[Breakage], backends: Sequence[str]) -> int:
    """Try each breakage; print a line for each, and return how many were not noticed."""
    spare: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        spare.put(copy)

    def noticed(breakage: Breakage) -> bool:
        copy = spare.get()
        try:
            return is_noticed(copy, breakage, backends)
        finally:
            spare.put(copy)

    with ThreadPoolExecutor(len(copies)) as threads:
        return list(threads.map(noticed, chosen)).count(False)


def is_noticed(copy: Copy, breakage: Breakage, backends: Sequence[str]) -> bool:
    """Try one breakage, print its line, and return whether a test was red on every backend."""
    concerned = [name for name in breakage.backends if name in (*backends, *NONE)]
    begun = time.monotonic()
    with copy.broken(breakage):
        results = copy.results((breakage.unharmed, *breakage.tests), concerned, patience=4)
    verdicts = {name: verdict(breakage, name, results) for name in concerned}
    cells = "  ".join(f"{name} {word}" for name, word in verdicts.items())
    print(f"{time.monotonic() - begun:5.1f} s  {breakage.name:<56}  {cells}", flush=True)
    return all(word == "red" for word in verdicts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the library and demand that tests notice.")
    parser.add_argument("words", nargs="*", help="only breakages with these words in their name")
    parser.add_argument("--backend", action="append", choices=ALL, help="only this one")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at one time")
    given = parser.parse_args()
    chosen = [b for b in BREAKAGES if all(word in b.name for word in given.words)]
    servers = Servers(os.environ)
    try:
        found = dict(servers_of(given.backend or ALL, servers))
        urls = {url_variable(name): url for name, url in found.items() if url}
        environment = {**os.environ, **urls, "ASYNCJOBQ_REQUIRE_BACKENDS": ""}
        with tempfile.TemporaryDirectory(prefix="asyncjobq-sabotage-") as folder:
            places = [Path(folder).resolve() / f"copy{number}" for number in range(given.jobs)]
            copies = [Copy(place, environment) for place in places]
            check_unbroken(copies[0], chosen, list(found))
            missed = run(copies, chosen, list(found))
    finally:
        servers.close()
    print(f"{len(chosen)} breakages, {missed} not noticed everywhere")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()

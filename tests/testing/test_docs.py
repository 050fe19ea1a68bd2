"""What docs/testing.md shows is run, each file under the name that stands in its first line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "testing.md").read_text()
FILES = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Give an empty project in which only the plugins that are named are loaded."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{pytester.path}")
    return pytester


def run(project: pytest.Pytester, **files: str) -> pytest.RunResult:
    """Run pytest on these files."""
    project.makepyfile(**files)
    loops = ("-o", "asyncio_default_fixture_loop_scope=function", "-p", "no:cacheprovider")
    plugins = ("-p", "_asyncjobq_pytest", "-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto")
    return project.runpytest_subprocess("-Werror", *plugins, *loops)


def test_all_snippets_are_files() -> None:
    assert TEXT.count("```python") == len(FILES) == 5


def test_the_tests(project: pytest.Pytester) -> None:
    run(project, **dict(named(0, 1, 2, 4))).assert_outcomes(passed=8)


def test_on_another_database(project: pytest.Pytester, database_url: str) -> None:
    files = dict(named(1, 2, 3))
    files["shop"] += f"TEST_DATABASE = {database_url!r}\n"
    run(project, **files).assert_outcomes(passed=6)


def named(*numbers: int) -> Iterator[tuple[str, str]]:
    """Give some of the files, by their names."""
    yield from (FILES[number] for number in numbers)

"""The command line in this process: what it says when called wrongly, and `init`."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncjobq import Scheduler, __version__
from asyncjobq.cli import main

MODULES = {
    "fine_jobs.py": """
import os
from asyncjobq import Scheduler
scheduler = Scheduler("sqlite+aiosqlite:///never.db")
number = 17
def nothing(): pass
async def make_scheduler(): return scheduler
def refuse(): return Scheduler("sqlite+aiosqlite:///never.db", concurrency=0)
""",
    "broken_jobs.py": "import json\n\nimport package_that_is_not_there\n",
    "misnamed_jobs.py": "from json import no_such_name\n",
}
NO_DRIVER = "sqlite:///never.db"

CALLS = [
    ("worker fine_jobs", 2, "write the module, a colon and the scheduler's name"),
    ("worker fine_jobs:", 2, "'fine_jobs:' names no scheduler"),
    ("worker :scheduler", 2, "':scheduler' names no scheduler"),
    ("worker no_jobs:scheduler", 2, "There is no module 'no_jobs', neither in"),
    ("worker fine_jobs.deeper:scheduler", 2, "There is no module 'fine_jobs.deeper'"),
    ("worker fine_jobs.py:scheduler", 2, "write the module's name, 'fine_jobs'"),
    ("worker jobs/fine.py:scheduler", 2, "write the module's name, 'jobs.fine'"),
    ("worker broken_jobs:s", 2, "broken_jobs.py, line 3: No module named 'package_that_is"),
    ("worker misnamed_jobs:s", 2, "importing it failed in"),
    ("worker fine_jobs:nowhere", 2, "'fine_jobs' has no 'nowhere'"),
    ("worker fine_jobs:os.nowhere", 2, "'fine_jobs' has no 'os.nowhere'"),
    ("worker fine_jobs:number", 2, "is 17, which is not a Scheduler"),
    ("worker fine_jobs:nothing", 2, "returns None, which is not a Scheduler"),
    ("worker fine_jobs:make_scheduler", 2, "make it a def that returns a Scheduler"),
    ("worker fine_jobs:refuse", 2, "concurrency must be an int of at least 1"),
    ("worker fine_jobs:scheduler --queues a,,b", 2, "A queue's name has 1 to 64 characters"),
    ("worker fine_jobs:scheduler --log-level loud", 2, "'loud' is no log level"),
    ("init", 2, "Name MODULE:OBJECT, --url, or set ASYNCJOBQ_URL"),
    ("init fine_jobs:scheduler --table-prefix x_", 2, "are the scheduler's own"),
    ("init fine_jobs:scheduler --url sqlite+aiosqlite:///x.db", 2, "are the scheduler's own"),
    ("init --url oracle://host/name", 2, "'oracle' is not a supported database"),
    (f"init --url {NO_DRIVER}", 2, "write sqlite+aiosqlite://"),
    ("init --url sqlite+aiosqlite:////no/such/folder/x.db", 2, "does not exist: /no/such/folder"),
    ("doctor", 2, "Name MODULE:OBJECT, --url, or set ASYNCJOBQ_URL"),
    ("doctor --url oracle://host/name", 2, "'oracle' is not a supported database"),
    ("doctor fine_jobs:scheduler", 2, "The tables cannot be checked: There is no database file"),
    ("demo . --keep fine_jobs.py", 2, "fine_jobs.py exists; name a new file"),
    ("demo . --keep x.db --url sqlite+aiosqlite:///y.db", 2, "--keep is for the SQLite file"),
    ("demo no/such/folder", 2, "no/such/folder is no folder"),
    ("demo empty", 2, "There are no Python files below"),
    ("demo . --url oracle://host/name", 2, "'oracle' is not a supported database"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of modules the current directory, and forget afterwards what was imported."""
    for name, source in MODULES.items():
        (tmp_path / name).write_text(source)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delenv("ASYNCJOBQ_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["asyncjobq", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("arguments", "code", "message"), CALLS)
def test_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    code: int,
    message: str,
) -> None:
    assert call(monkeypatch, *arguments.split()) == code
    told = capsys.readouterr().err
    assert message in told
    assert told.startswith("Error: ")
    assert told.count("\n") == 1, told


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("arguments", ["worker", "demo --max-files 0", "no"])
def test_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    assert call(monkeypatch, *arguments.split()) == 2
    assert "Usage: " in capsys.readouterr().err


def test_init(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCJOBQ_URL", "sqlite+aiosqlite:///never.db")
    assert call(monkeypatch, "worker", "fine_jobs:scheduler") == 2
    assert "asyncjobq init" in capsys.readouterr().err
    for arguments in (("fine_jobs:scheduler",), (), ("--table-prefix", "other_")):
        assert call(monkeypatch, "init", *arguments) == 0
        assert capsys.readouterr().out == (
            "The tables in sqlite+aiosqlite:///never.db are there and up to date.\n"
        )
    with closing(sqlite3.connect(folder / "never.db")) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        assert {"jobs", "job_deps", "other_jobs", "other_job_deps"} < {name for (name,) in tables}


def test_the_password_is_shown_to_nobody() -> None:
    scheduler = Scheduler("postgresql+asyncpg://me:secret@host/x")
    assert repr(scheduler) == "<Scheduler on postgresql+asyncpg://me:***@host/x>"


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"asyncjobq {__version__}\n"


def test_completion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_ASYNCJOBQ_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "asyncjobq wor")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert not call(monkeypatch)
    assert capsys.readouterr().out.split() == ["worker", "workers"]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name.startswith("asyncjobq.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    told = call(monkeypatch, "--version")
    assert told == f"The command line needs {missing}: pip install 'asyncjobq[cli]'"


def test_errors_inside_the_module_keep_their_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "raising_jobs.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "argv", ["asyncjobq", "worker", "raising_jobs:scheduler"])
    with pytest.raises(ZeroDivisionError):
        main()


@pytest.fixture
def tables(folder: Path) -> Path:
    """Make the tables in a file `jobs.db`."""

    async def make() -> None:
        async with Scheduler("sqlite+aiosqlite:///jobs.db") as scheduler:
            await scheduler.create_schema()

    asyncio.run(make())
    return folder / "jobs.db"


def break_rows(file: Path) -> None:
    """Break rules of the tables: two jobs are blocked by nothing, one counts an attempt."""
    insert = (
        "INSERT INTO jobs (queue, type, args, state, attempt, created_at, updated_at) "
        "VALUES ('default', 'work', '{}', ?, ?, '2026-01-01', '2026-01-01')"
    )
    with closing(sqlite3.connect(file)) as connection:
        connection.executemany(insert, [("blocked", 0), ("blocked", 0), ("ready", 1)])
        connection.commit()


class TestDoctor:
    @pytest.fixture
    def doctor(
        self, tables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int | str | None, str]]:
        """Give what runs the command, and returns its exit code and what it printed."""

        def run(*options: str) -> tuple[int | str | None, str]:
            url = f"sqlite+aiosqlite:///{tables}"
            code = call(monkeypatch, "doctor", "--url", url, *options)
            printed = capsys.readouterr()
            assert printed.err == ""
            return code, printed.out

        return run

    def test_says_that_all_is_well(self, doctor: Any) -> None:
        code, printed = doctor()
        assert (code, printed.startswith("All is well: ")) == (0, True)

    def test_finds_repairs_and_says_what_it_did(self, doctor: Any, tables: Path) -> None:
        break_rows(tables)
        code, printed = doctor("--examples", "1")
        assert code == 1
        assert printed.splitlines() == [
            "Found: attempts miscounted (1). Each of these counts less than no attempt, or more "
            "than it was ever leased: 3.",
            "    Nothing mends this by itself; look at them.",
            "Found: blocked by nothing (2). Each of these is blocked, but every job that it "
            "depends on is done and what it is in has opened: 1 and 1 more.",
            "    It is settled, which lets it go.",
        ]
        code, printed = doctor("--repair")
        assert code == 1
        assert printed.splitlines()[4:] == [
            "Mended: blocked by nothing (2). It is settled, which lets it go.",
            "Left: attempts miscounted (1). Each of these counts less than no attempt, or more "
            "than it was ever leased: 3.",
        ]

    def test_ends_well_when_all_is_mended(self, doctor: Any, tables: Path) -> None:
        break_rows(tables)
        with closing(sqlite3.connect(tables)) as connection:
            connection.execute("DELETE FROM jobs WHERE attempt = 1")
            connection.commit()
        code, printed = doctor("--repair")
        assert (code, "All is well: " in printed) == (0, True)

    def test_speaks_json(self, doctor: Any, tables: Path) -> None:
        break_rows(tables)
        code, printed = doctor("--json")
        report = json.loads(printed)
        assert (code, report["clean"], len(report["findings"])) == (1, False, 2)
        assert report["findings"][1]["examples"] == [1, 2]
        code, printed = doctor("--json", "--repair")
        report = json.loads(printed)
        assert (code, report["clean"], report["mended"][0]["count"]) == (1, False, 2)

    def test_takes_no_check_that_was_cut_short_for_a_good_one(self, doctor: Any) -> None:
        code, printed = doctor("--timeout", "0")
        assert code == 2
        assert "Not checked, for lack of time: blocked by nothing." in printed

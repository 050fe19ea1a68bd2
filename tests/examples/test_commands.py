"""The command line in this process: what it says when called wrongly, and `init`."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

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
    ("worker fine_jobs:refuse", 1, "concurrency must be an int of at least 1"),
    ("worker fine_jobs:scheduler --queues a,,b", 1, "A queue's name has 1 to 64 characters"),
    ("worker fine_jobs:scheduler --log-level loud", 2, "'loud' is no log level"),
    ("init", 2, "Name MODULE:OBJECT, --url, or set ASYNCJOBQ_URL"),
    ("init fine_jobs:scheduler --table-prefix x_", 2, "are the scheduler's own"),
    ("init fine_jobs:scheduler --url sqlite+aiosqlite:///x.db", 2, "are the scheduler's own"),
    ("init --url oracle://host/name", 1, "'oracle' is not a supported database"),
    (f"init --url {NO_DRIVER}", 1, "write sqlite+aiosqlite://"),
    ("init --url sqlite+aiosqlite:////no/such/folder/x.db", 1, "does not exist: /no/such/folder"),
    ("demo . --keep fine_jobs.py", 2, "fine_jobs.py exists; name a new file"),
    ("demo . --keep x.db --url sqlite+aiosqlite:///y.db", 2, "--keep is for the SQLite file"),
    ("demo no/such/folder", 2, "no/such/folder is no folder"),
    ("demo empty", 2, "There are no Python files below"),
    ("demo . --url oracle://host/name", 1, "'oracle' is not a supported database"),
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
    assert call(monkeypatch, "worker", "fine_jobs:scheduler") == 1
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

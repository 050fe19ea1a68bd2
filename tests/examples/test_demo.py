"""`asyncjobq demo`, as a newcomer runs it: nothing in the home, and nothing left behind."""

from __future__ import annotations

import re
import sqlite3
import sys
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from sqlalchemy import inspect, text
from sqlalchemy.ext.asyncio import create_async_engine

from asyncjobq.cli.demo import EXAMPLE, Demo, run_demo
from asyncjobq.cli.errors import UsageError
from examples.programs import COMMAND, EXAMPLES, Place

FILES = {
    "main.py": "import json\nfrom app.store import keep\nfrom . import sibling\n",
    "app/__init__.py": "",
    "app/store.py": "import json, os.path\n\ndef keep():\n    import sqlite3\n",
    "app/copy.py": "import json, os.path\n\ndef keep():\n    import sqlite3\n",
    "app/broken.py": "print 'no Python 3'\n",
    "app/notes.txt": "import nothing\n",
    "app/__pycache__/store.py": "import nothing\n",
    "site-packages/other.py": "import nothing\n",
    ".hidden/other.py": "import nothing\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Give a small folder of Python source."""
    return _written(tmp_path / "tree", FILES)


@pytest.fixture
def larger_tree(tmp_path: Path) -> Path:
    """Give a folder whose files keep a worker busy for a second."""
    names = (f"package{n % 7}/module{n}.py" for n in range(250))
    return _written(tmp_path / "tree", dict.fromkeys(names, "import os\n" * 400))


def _written(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return root


def test_report(place: Place, tree: Path) -> None:
    ran = place.run(*COMMAND, "demo", str(tree))
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    shown = " ".join(ran.stdout.split())
    assert "5 Python files below" in shown
    assert re.search(r"app │ 4 │ 9 │", shown)
    assert re.search(r"\(top level\) │ 1 │ 3 │", shown)
    for module, count in {"json": 3, "os": 2, "sqlite3": 2, "app": 1}.items():
        assert f"│ {module} │ {count} │" in shown
    assert "nothing" not in shown
    assert "5 files, 12 lines" in shown
    assert "1 is a copy of another; 1 cannot be parsed: app/broken.py: SyntaxError" in shown
    assert re.search(r"6 jobs in \S+ s, \d+ a second: 6 done", shown)
    assert place.left_behind == []


@pytest.fixture
def imports_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what the demo imports in this process, and from where."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, EXAMPLE, raising=False)


async def demonstrate(demo: Demo) -> str:
    """Run the demo in this process, which is faster, and return what it shows."""
    shown = StringIO()
    await run_demo(demo, Console(file=shown, width=100))
    return shown.getvalue()


@pytest.mark.usefixtures("imports_undone")
async def test_report_on_each_database(tree: Path, backend_name: str, database_url: str) -> None:
    engine = create_async_engine(database_url)
    try:
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE jobs (mine INTEGER)"))
        assert "6 done" in await demonstrate(Demo(tree, url=database_url))
        async with engine.connect() as connection:
            tables = await connection.run_sync(lambda c: inspect(c).get_table_names())
        assert [name for name in tables if name != "sqlite_sequence"] == ["jobs"], backend_name
    finally:
        await engine.dispose()


@pytest.mark.usefixtures("imports_undone")
async def test_keep(tmp_path: Path, tree: Path) -> None:
    demo = Demo(tree, keep=tmp_path / "kept.db", max_files=2)
    assert "2 Python files" in await demonstrate(demo)
    with closing(sqlite3.connect(tmp_path / "kept.db")) as connection:
        states = connection.execute("SELECT state, count(*) FROM jobs GROUP BY 1").fetchall()
    assert states == [("done", 3)]
    with pytest.raises(UsageError, match="exists; name a new file"):
        await demonstrate(demo)


def test_kill(place: Place, larger_tree: Path) -> None:
    ran = place.run(*COMMAND, "demo", "--kill", str(larger_tree))
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    assert "251 done" in ran.stdout
    killed = re.search(r"killed with (\d+) jobs in its hands", ran.stdout)
    again = re.search(r"(\d+) of them ran again: (\d+) starts, 251 ends", ran.stdout)
    assert killed is not None
    assert again is not None, ran.stdout
    assert 1 <= int(killed[1]) <= int(again[1])
    assert int(again[2]) >= 251 + int(again[1])
    assert place.left_behind == []


def test_the_example_by_itself(place: Place, tree: Path) -> None:
    ran = place.run(str(EXAMPLES / "source_report.py"), str(tree))
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    assert ran.stdout.startswith("5 files, 12 lines, ")
    assert "3 files import json" in ran.stdout
    assert place.left_behind == []

"""The test suite's own databases: they answer, are empty, isolated, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import inspect, make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from capabilities import missing_capability
from databases import Databases
from servers import (
    Servers,
    WrongServerError,
    administration_engine,
    check_dialect,
    check_product,
    url_variable,
)

TESTS = Path(__file__).parent
MakeDatabase = Callable[[str], str]


@asynccontextmanager
async def connection_to(url: str) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(url, poolclass=NullPool)
    async with engine.begin() as connection:
        yield connection
    await engine.dispose()


async def tables_in(url: str) -> list[str]:
    async with connection_to(url) as connection:
        return await connection.run_sync(lambda sync: inspect(sync).get_table_names())


async def run(url: str, *statements: str) -> None:
    async with connection_to(url) as connection:
        for statement in statements:
            await connection.execute(text(statement))


async def count(url: str, table: str) -> int:
    async with connection_to(url) as connection:
        return int(await connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0)


async def test_answers(database_url: str) -> None:
    async with connection_to(database_url) as connection:
        assert await connection.scalar(text("SELECT 1")) == 1


async def test_is_the_named_product(backend_name: str, database_url: str, servers: Servers) -> None:
    async with connection_to(database_url) as connection:
        dialect = connection.dialect
    is_mariadb = getattr(dialect, "is_mariadb", False)
    product = "mariadb" if is_mariadb else dialect.name
    assert product == backend_name
    assert servers.get(backend_name).version[0].isdigit()


@pytest.mark.parametrize("turn", [1, 2])
async def test_is_empty_each_time(database_url: str, turn: int) -> None:
    assert await tables_in(database_url) == [], turn
    await run(database_url, "CREATE TABLE left_behind (id INTEGER)")


async def test_databases_are_isolated(backend_name: str, make_database: MakeDatabase) -> None:
    first, second = make_database(backend_name), make_database(backend_name)
    await run(first, "CREATE TABLE only_here (id INTEGER)")
    assert await tables_in(second) == []


@pytest.mark.requires("server")
async def test_open_transactions_do_not_hinder_dropping(
    backend_name: str, servers: Servers, tmp_path: Path
) -> None:
    databases = Databases(servers, tmp_path)
    with databases.fresh(backend_name) as url:
        await run(url, "CREATE TABLE held (id INTEGER)")
        engine = create_async_engine(url, poolclass=NullPool)
        connection = await engine.connect()
        await connection.execute(text("INSERT INTO held VALUES (1)"))
    databases.close()
    await connection.invalidate()
    await connection.close()
    await engine.dispose()
    assert make_url(url).database not in database_names(servers, backend_name)


def database_names(servers: Servers, backend: str) -> list[str]:
    query = "SELECT datname FROM pg_database" if backend == "postgresql" else "SHOW DATABASES"
    engine = administration_engine(servers.get(backend))
    with engine.connect() as connection:
        names = [str(name) for name in connection.scalars(text(query))]
    engine.dispose()
    return names


async def prepare_two_tables(url: str) -> None:
    await run(
        url,
        "CREATE TABLE version (number INTEGER)",
        "INSERT INTO version VALUES (7)",
        "CREATE TABLE work (id INTEGER PRIMARY KEY)",
    )


async def test_prepared_databases_have_the_same_rows_each_time(
    backend_name: str, databases: Databases
) -> None:
    for _ in range(3):
        async with databases.prepared(backend_name, prepare_two_tables) as url:
            assert (await count(url, "version"), await count(url, "work")) == (1, 0)
            await run(url, "DELETE FROM version", "INSERT INTO work VALUES (1)")


async def test_prepared_databases_have_the_same_tables_each_time(
    backend_name: str, databases: Databases
) -> None:
    for statement in (
        "CREATE TABLE surprise (id INTEGER)",
        "DROP TABLE work",
        "CREATE INDEX surprise ON version (number)",
        "ALTER TABLE version ADD COLUMN surprise INTEGER",
    ):
        async with databases.prepared(backend_name, prepare_two_tables) as url:
            assert sorted(await tables_in(url)) == ["version", "work"]
            await run(url, statement)


async def test_two_prepared_databases_at_once(backend_name: str, databases: Databases) -> None:
    async with (
        databases.prepared(backend_name, prepare_two_tables) as first,
        databases.prepared(backend_name, prepare_two_tables) as second,
    ):
        await run(first, "INSERT INTO work VALUES (1)")
        assert await count(second, "work") == 0


def test_mysql_and_mariadb_are_not_taken_for_each_other() -> None:
    check_product("mysql", "8.4.3")
    check_product("mariadb", "10.11.19-MariaDB")
    with pytest.raises(WrongServerError, match="give it as ASYNCJOBQ_TEST_MARIADB_URL"):
        check_product("mysql", "10.11.19-MariaDB")
    with pytest.raises(WrongServerError, match="give it as ASYNCJOBQ_TEST_MYSQL_URL"):
        check_product("mariadb", "8.4.3")


def test_a_url_of_another_database_is_refused() -> None:
    check_dialect("mariadb", make_url("mysql+aiomysql://root@localhost/test"))
    with pytest.raises(WrongServerError, match="is a URL of sqlite, not of postgresql"):
        check_dialect("postgresql", make_url("sqlite+aiosqlite:///jobs.db"))


def test_an_unknown_required_backend_is_named() -> None:
    problems = list(Servers({"ASYNCJOBQ_REQUIRE_BACKENDS": "sqlite, oracle"}).problems())
    assert len(problems) == 1
    assert "'oracle' is not one of sqlite, postgresql, mysql, mariadb" in problems[0]


def test_capabilities() -> None:
    assert missing_capability("postgresql", ["listen", "server", "row_locks"]) is None
    assert missing_capability("mysql", ["server", "listen"]) == (
        "requires listen: this database cannot notify another process"
    )
    with pytest.raises(ValueError, match="no capability 'teleport'"):
        missing_capability("sqlite", ["teleport"])


def run_pytest(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_inner.py").write_text(code)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-q", folder],
        env={**os.environ, "PYTHONPATH": str(TESTS), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


SKIPPING = """
import pytest

def test_that_gives_up(backend_name):
    if backend_name == "sqlite":
        pytest.skip("not today")

@pytest.mark.requires("listen")
def test_that_listens(backend_name):
    raise AssertionError(backend_name)
"""


def test_an_unexplained_skip_on_a_required_backend_fails(tmp_path: Path) -> None:
    done = run_pytest(
        tmp_path, SKIPPING, PYTEST_ADDOPTS="-k sqlite", ASYNCJOBQ_REQUIRE_BACKENDS="sqlite"
    )
    assert done.returncode == 1, done.stdout
    assert "test_that_gives_up[sqlite]: Skipped: not today" in done.stdout
    assert "test_that_listens[sqlite]:" not in done.stdout
    assert "sqlite        0 passed,    0 failed,    2 skipped" in done.stdout


def test_skips_are_allowed_where_nothing_is_required(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, SKIPPING, PYTEST_ADDOPTS="-k sqlite", ASYNCJOBQ_REQUIRE_BACKENDS="")
    assert done.returncode == 0, done.stdout


def test_a_server_that_does_not_answer_fails_the_session(tmp_path: Path) -> None:
    url = "mysql+aiomysql://root@127.0.0.1:1/test"
    done = run_pytest(
        tmp_path, SKIPPING, ASYNCJOBQ_REQUIRE_BACKENDS="", **{url_variable("mysql"): url}
    )
    assert done.returncode == 1, done.stdout
    assert "ASYNCJOBQ_TEST_MYSQL_URL: no server answers" in done.stdout
    assert "no tests ran" in done.stdout


STARTING = """
import time
from servers import Servers
from throwaway import ServerProcess

start = ServerProcess.__init__
def told(self, *arguments, **words):
    start(self, *arguments, **words)
    print(self.folder, flush=True)
ServerProcess.__init__ = told
Servers({}).get("postgresql")
print("answers", flush=True)
time.sleep(600)
"""


def test_a_killed_test_run_leaves_no_server_behind(tmp_path: Path) -> None:
    script = tmp_path / "starting.py"
    script.write_text(STARTING)
    with subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert process.stdout.readline() == "answers\n"
        assert folder.is_dir()
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < deadline, f"{folder} is still there"
        time.sleep(0.02)

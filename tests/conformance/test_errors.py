"""Bad input gets an error that is named, says what to do, and comes before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import AssertionPool, Pool, StaticPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from asyncjobq import (
    AsyncJobQError,
    ConfigurationError,
    HandlerError,
    Handlers,
    InvalidJobError,
    JobFailed,
    JobNotFoundError,
    Scheduler,
    SchemaError,
    UnsupportedDatabaseError,
)
from asyncjobq.backends import mysql, postgresql, sqlite
from conformance.kit import Jobs
from conformance.running import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestUrl:
    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("oracle+oracledb://localhost/x", "'oracle' is not a supported database"),
            ("mssql+aioodbc://localhost/x", "'mssql' is not a supported database"),
            ("nonsense://localhost/x", "'nonsense' is not a supported database"),
            ("not a url", "is not a database URL"),
            ("", "is not a database URL"),
            ("jobs.db", "is not a database URL"),
            ("sqlite:///jobs.db", r"write sqlite\+aiosqlite://"),
            ("postgresql://localhost/x", r"write postgresql\+asyncpg://"),
            ("postgres://localhost/x", r"write postgresql\+asyncpg://localhost/x"),
            ("mysql://localhost/x", r"write mysql\+aiomysql://"),
            ("mariadb://localhost/x", r"write mariadb\+aiomysql://"),
            ("sqlite+pysqlite:///jobs.db", r"[Ww]rite sqlite\+aiosqlite://"),
            ("postgresql+psycopg2://localhost/x", r"postgresql\+asyncpg://"),
            ("mysql+pymysql://localhost/x", r"Write mysql\+aiomysql://"),
            ("mysql+nonsense://localhost/x", "nonsense"),
            ("postgresql+psycopg://localhost/x", r"not speak psycopg.*postgresql\+asyncpg"),
            ("sqlite+aiosqlite://", "in memory"),
            ("sqlite+aiosqlite:///:memory:", "in memory"),
            ("sqlite+aiosqlite:///file:x?mode=memory&uri=true", "in memory"),
        ],
    )
    async def test_that_leads_to_no_database_of_ours(self, url: str, says: str) -> None:
        with pytest.raises(ConfigurationError, match=says) as caught:
            Scheduler(url)
        assert isinstance(caught.value, AsyncJobQError)
        if "not a supported" in says or "in memory" in says:
            assert isinstance(caught.value, UnsupportedDatabaseError)

    @pytest.mark.parametrize(
        "url",
        [
            "postgres://me:secret@host/x",
            "mysql://me:secret@host/x",
            "mysql+pymysql://me:secret@h/x",
        ],
    )
    async def test_is_written_out_without_its_password(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match=r"me:\*\*\*@h\w*/x") as caught:
            Scheduler(url)
        assert "secret" not in str(caught.value)

    async def test_in_place_of_what_is_bound_to_one(self) -> None:
        engine: Any = create_engine("postgresql+psycopg://me:secret@host/x")
        with pytest.raises(ConfigurationError, match=r"postgresql\+asyncpg://me:\*\*\*@host/x"):
            Scheduler(engine)
        maker: Any = sessionmaker(engine)
        with pytest.raises(ConfigurationError, match=r"not a sessionmaker.*the engine"):
            Scheduler(maker)

    async def test_of_an_engine_that_leads_to_none(self) -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        with pytest.raises(UnsupportedDatabaseError, match="in memory"):
            Scheduler(engine)
        await engine.dispose()

    @pytest.mark.requires("server")
    @pytest.mark.parametrize("pool", [StaticPool, AssertionPool])
    async def test_of_an_engine_with_one_connection_for_all(
        self, jobs: Jobs, pool: type[Pool]
    ) -> None:
        """Two transactions of ours on it at once would be one, or none."""
        engine = create_async_engine(jobs.url, poolclass=pool)
        with pytest.raises(ConfigurationError, match=f"{pool.__name__}.*poolclass"):
            Scheduler(engine)
        await engine.dispose()

    async def test_for_listening_where_nothing_listens(self, jobs: Jobs) -> None:
        if jobs.backend_name == "postgresql":
            jobs.another(listen_url=jobs.url)
            return
        with pytest.raises(ConfigurationError, match="listen_url"):
            Scheduler(jobs.url, listen_url=jobs.url)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Scheduler]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"
    return lambda **settings: Scheduler(url, **settings)


class TestSettings:
    @pytest.mark.parametrize(
        ("setting", "values"),
        [
            ("concurrency", [-1, 0, 1.5, "4", True, None]),
            ("lease_ttl", [0.999, 0, -1, timedelta(milliseconds=999), "30", None, float("nan")]),
            ("lease_ttl", [1e18, 10**400, timedelta.max]),
            ("poll_interval", [0, -1, float("inf"), "1", 10**400]),
            ("stop_timeout", [-0.1, None, float("nan")]),
            ("default_timeout", [0, -1, "1h", float("inf")]),
            ("max_result_bytes", [0, -5, 1.5]),
            ("worker_id", ["", "x" * 256, 5, "a\x00b", "\ud800"]),
            (
                "queues",
                [
                    "default",
                    [],
                    {},
                    [""],
                    ["q" * 65],
                    [1],
                    {"a": 0},
                    {"a": "2"},
                    {"a": 1.5},
                    None,
                    5,
                ],
            ),
            ("handlers", [Handlers(), None, [print]]),
            ("table_prefix", [5, None, "a b;", "p" * 80]),
            ("schema", [5, "", "s" * 80]),
        ],
    )
    async def test_that_make_no_sense_are_named(
        self, make: Callable[..., Scheduler], setting: str, values: list[Any]
    ) -> None:
        for value in values:
            with pytest.raises(ConfigurationError, match=setting.removesuffix("s")):
                make(**{setting: value})

    async def test_that_do_are_taken(self, make: Callable[..., Scheduler]) -> None:
        make(
            concurrency=1,
            lease_ttl=timedelta(seconds=1),
            poll_interval=0.01,
            stop_timeout=0,
            default_timeout=None,
            queues={"default": 10, "media": 2},
            worker_id="ü" * 255,
            table_prefix="queue_",
        )

    async def test_of_a_lease_longer_than_servers_let_a_session_idle(self, jobs: Jobs) -> None:
        scheduler = jobs.another(lease_ttl=timedelta(days=365))

        @scheduler.handler
        async def work() -> int:
            return 1

        job = await jobs.enqueue()
        async with jobs.limited_time():
            await scheduler.drain()
        assert (await jobs.scheduler.get(job)).result == 1

    @pytest.mark.parametrize(
        "options",
        [
            {"queu": "media"},
            {"queue": ""},
            {"queue": "q" * 65},
            {"timeout": 0},
            {"timeout": float("nan")},
            {"max_attempts": 0},
            {"max_attempts": None},
            {"retry": 5},
            {"aliases": "name"},
        ],
        ids=str,
    )
    async def test_of_a_handler(
        self, make: Callable[..., Scheduler], options: dict[str, Any]
    ) -> None:
        with pytest.raises(HandlerError, match=next(iter(options))):
            make().handler("work", **options)


class TestOldServer:
    async def test_is_refused_with_its_version(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgresql, "OLDEST", 990_000)
        monkeypatch.setattr(mysql, "OLDEST_MYSQL", (99, 0))
        monkeypatch.setattr(mysql, "OLDEST_MARIADB", (99, 0))
        monkeypatch.setattr(sqlite, "OLDEST", (99, 0))

        async def enter() -> None:
            async with jobs.scheduler.serving():
                pass

        calls = (jobs.scheduler.create_schema, jobs.scheduler.serve, jobs.scheduler.drain, enter)
        for call in calls:
            with pytest.raises(
                UnsupportedDatabaseError, match=r"\d is too old.*or newer is needed"
            ):
                await call()

    @pytest.mark.requires("server")
    async def test_a_storage_engine_without_row_locks_is_refused(
        self, backend_name: str, database_url: str
    ) -> None:
        if backend_name == "postgresql":
            return
        engine = create_async_engine(database_url)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE jobs (id INTEGER) ENGINE = MyISAM"))
        await engine.dispose()
        async with Scheduler(database_url) as scheduler:
            with pytest.raises(UnsupportedDatabaseError, match="ENGINE=InnoDB"):
                await scheduler.serve()


class TestJobs:
    async def test_unknown_ids(self, jobs: Jobs) -> None:
        for call in (jobs.scheduler.get, jobs.scheduler.wait):
            with pytest.raises(JobNotFoundError, match="no job 815"):
                await call(815)

    async def test_what_is_no_id(self, jobs: Jobs) -> None:
        nonsense: list[Any] = ["1", None, 1.5, True, -(2**70), 2**70]
        for value in nonsense:
            for call in (jobs.scheduler.get, jobs.scheduler.wait):
                with pytest.raises((InvalidJobError, JobNotFoundError)):
                    await call(value)
        wrong: Any = [2**70]
        with pytest.raises(InvalidJobError):
            await jobs.scheduler.enqueue("work", depends_on=wrong)

    async def test_what_is_no_filter(self, jobs: Jobs) -> None:
        with pytest.raises(ConfigurationError, match=r"'gone'.*the states are scheduled"):
            await jobs.scheduler.find(state="gone")
        with pytest.raises(TypeError, match="stat"):
            await jobs.scheduler.find(stat="done")

    async def test_what_is_no_timeout(self, jobs: Jobs) -> None:
        job = await jobs.enqueue()
        with pytest.raises(ConfigurationError, match="timeout"):
            await jobs.scheduler.wait(job, timeout=float("nan"))

    async def test_a_result_that_cannot_be_stored(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def work() -> Any:
            return {"a": object()}

        async with serving(jobs.scheduler):
            job = await jobs.scheduler.enqueue(work.job())
            with pytest.raises(JobFailed, match="result cannot be stored"):
                await jobs.scheduler.wait(job)
        assert (await jobs.row(job)).attempt == 1

    async def test_an_error_that_would_act_on_a_terminal(
        self, jobs: Jobs, caplog: pytest.LogCaptureFixture
    ) -> None:
        @jobs.scheduler.handler(max_attempts=1)
        async def work() -> None:
            raise ValueError("\x1b[2Jcleared\x07 \x00 \ud800\nsecond line")

        async with serving(jobs.scheduler):
            job = await jobs.scheduler.enqueue(work.job())
            with pytest.raises(JobFailed, match="second line"):
                await jobs.scheduler.wait(job)
        (said,) = (r.getMessage() for r in caplog.records if "cleared" in r.getMessage())
        assert said.endswith(r"ValueError: \x1b[2Jcleared\x07 \x00 \ud800")

    async def test_arguments_that_do_not_fit_the_handler_any_more(self, jobs: Jobs) -> None:
        """Enqueued by another release; the jobs beside it run."""
        bad = await jobs.enqueue(args={"gone": 1})
        good = await jobs.enqueue(args={"kept": 1})

        @jobs.scheduler.handler
        async def work(kept: int) -> int:
            return kept

        async with serving(jobs.scheduler):
            with pytest.raises(JobFailed, match="there is no parameter 'gone'"):
                await jobs.scheduler.wait(bad)
            assert await jobs.scheduler.wait(good) == 1
        assert (await jobs.row(bad)).attempt == 1


async def test_tables_that_were_forgotten_are_named_wherever_they_are_missed(
    database_url: str,
) -> None:
    async with Scheduler(database_url) as scheduler:
        for call in (scheduler.enqueue("work"), scheduler.get(1), scheduler.find()):
            with pytest.raises(SchemaError, match="create_schema"):
                await call


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("limit", [-1, 2**63, 2**70, None, True]),
        ("after", [-1, 2**63, "1"]),
        ("state", ["nonsense", 5, [5]]),
        ("type", [5, "\ud800", "a\x00b"]),
        ("queue", [5, "a\x00b"]),
        ("group_key", [5, "\ud800"]),
    ],
)
async def test_a_filter_that_makes_no_sense_is_named(
    make: Callable[..., Scheduler], name: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(ConfigurationError, match=name):
            await make().find(**{name: value})

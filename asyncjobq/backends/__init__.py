"""One module for each database product; the rest of the library names none of them."""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import Dialect, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from asyncjobq.backends import listening, mysql, postgresql, sqlite_file
from asyncjobq.backends.base import Backend, Database
from asyncjobq.backends.mysql import MySQLBackend
from asyncjobq.backends.postgresql import PostgreSQLBackend
from asyncjobq.backends.servers import ServerDatabase
from asyncjobq.backends.sqlite import SQLiteBackend
from asyncjobq.errors import ConfigurationError, UnsupportedDatabaseError
from asyncjobq.models import Tables

__all__ = ["backend_for", "open_database"]

_BACKENDS: dict[str, type[Backend]] = {
    "sqlite": SQLiteBackend,
    "postgresql": PostgreSQLBackend,
    "mysql": MySQLBackend,
    "mariadb": MySQLBackend,
}
_DRIVERS = {
    "sqlite": ("aiosqlite", None),
    "postgresql": ("asyncpg", "postgresql"),
    "mysql": ("aiomysql", "mysql"),
    "mariadb": ("aiomysql", "mysql"),
}
EXAMPLES = (
    "sqlite+aiosqlite:///jobs.db, postgresql+asyncpg://user@host/name, "
    "mysql+aiomysql://user@host/name or mariadb+aiomysql://user@host/name"
)


@lru_cache
def _backend(name: str, tables: Tables) -> Backend:
    return _BACKENDS[name](tables)


def backend_for(dialect: Dialect, tables: Tables) -> Backend:
    """Return the backend that speaks to connections of this dialect."""
    return _backend(_supported(dialect.name), tables)


def open_database(
    source: str | URL | AsyncEngine,
    tables: Tables,
    *,
    lease_ttl: float,
    listen_url: str | URL | None = None,
) -> Database:
    """Open the library's own connections to what the URL or engine names; connects to nothing.

    `listen_url` leads around a connection pooler that does not pass notifications on.
    """
    if isinstance(source, AsyncEngine):
        engine, owns_engine = source, False
    else:
        engine, owns_engine = _make_engine(source), True
    name = _supported(engine.dialect.name)
    if listen_url is not None and not _BACKENDS[name].listens:
        raise ConfigurationError("listen_url is for databases with LISTEN, that is PostgreSQL.")
    if name == "sqlite":
        return sqlite_file.open_database(engine, tables, owns_engine=owns_engine)
    backend = backend_for(engine.dialect, tables)
    product = postgresql if name == "postgresql" else mysql
    return ServerDatabase(
        engine,
        _BACKENDS[name](tables),
        owns_engine=owns_engine,
        settings=product.session_settings(lease_ttl),
        idle_limit=mysql.idle_limit(lease_ttl) * 0.9 if product is mysql else None,
        watch=listening.listen if backend.listens else None,
        watch_ends=listening.listen_for_ends if backend.listens else None,
        listen_engine=None if listen_url is None else _make_engine(listen_url),
    )


def _make_engine(source: str | URL) -> AsyncEngine:
    try:
        url = make_url(source)
    except (ArgumentError, ValueError):  # not shown: it may hold a password
        raise ConfigurationError(
            f"What was given is not a database URL. Examples: {EXAMPLES}."
        ) from None
    name = _supported(url.get_backend_name())
    _require_async_driver(url, name)
    try:
        if name == "sqlite":
            return sqlite_file.make_engine(url)
        return create_async_engine(url, pool_size=5, max_overflow=10, pool_use_lifo=True)
    except ModuleNotFoundError as error:
        raise ConfigurationError(_install(url, name)) from error
    except NoSuchModuleError as error:
        raise ConfigurationError(f"{error} Examples of URLs: {EXAMPLES}.") from error
    except InvalidRequestError as error:  # a driver that is not asynchronous
        raise ConfigurationError(f"{error} Write {name}+{_DRIVERS[name][0]}://…") from error


def _supported(name: str) -> str:
    if name not in _BACKENDS:
        raise UnsupportedDatabaseError(
            f"{name!r} is not a supported database. Examples of URLs: {EXAMPLES}."
        )
    return name


def _require_async_driver(url: URL, name: str) -> None:
    driver = _DRIVERS[name][0]
    if "+" not in url.drivername:
        raise ConfigurationError(
            f"The URL names no asynchronous driver; write {url.drivername}+{driver}://…"
        )


def _install(url: URL, name: str) -> str:
    extra = _DRIVERS[name][1]
    install = f"pip install 'asyncjobq[{extra}]'" if extra else "pip install aiosqlite"
    return (
        f"The driver of {url.drivername!r} is not installed. {install} installs the one of "
        f"{name}+{_DRIVERS[name][0]}://…"
    )

"""One module for each database product; the rest of the library names none of them."""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import AssertionPool, Dialect, Engine, StaticPool, make_url
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
_KNOWN = {
    "sqlite": ("aiosqlite",),
    "postgresql": ("asyncpg",),
    "mysql": ("aiomysql", "asyncmy"),
    "mariadb": ("aiomysql", "asyncmy"),
}
_ALIASES = {"postgres": "postgresql"}
_OF_SESSIONS = "For sessions and their makers, give the engine that they are bound to."
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
    _require_known_driver(engine.dialect, name)
    if listen_url is not None and not _BACKENDS[name].listens:
        raise ConfigurationError("listen_url is for databases with LISTEN, that is PostgreSQL.")
    if name == "sqlite":
        return sqlite_file.open_database(engine, tables, owns_engine=owns_engine)
    _require_shared_pool(engine)
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
        raise ConfigurationError(_no_url(source)) from None
    name = _supported(_ALIASES.get(url.drivername, url.get_backend_name()))
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
        raise ConfigurationError(f"{error} Write {_with_driver(url, name)}") from error


def _supported(name: str) -> str:
    if name not in _BACKENDS:
        raise UnsupportedDatabaseError(
            f"{name!r} is not a supported database. Examples of URLs: {EXAMPLES}."
        )
    return name


def _require_async_driver(url: URL, name: str) -> None:
    if "+" not in url.drivername:
        raise ConfigurationError(
            f"The URL names no asynchronous driver; write {_with_driver(url, name)}"
        )


def _require_known_driver(dialect: Dialect, name: str) -> None:
    if dialect.driver not in _KNOWN[name]:
        known = " or ".join(f"{name}+{driver}" for driver in _KNOWN[name])
        raise UnsupportedDatabaseError(
            f"The scheduler's own connections do not speak {dialect.driver}. Give it a URL or an "
            f"engine with {known}; sessions of yours, as in session=, may have other drivers."
        )


def _require_shared_pool(engine: AsyncEngine) -> None:
    """Refuse a pool whose connection several tasks of ours would use at the same moment."""
    if isinstance(engine.pool, StaticPool | AssertionPool):
        pool = type(engine.pool).__name__
        raise ConfigurationError(
            f"The engine has a {pool}, which gives all tasks one connection. Leave poolclass= out, "
            "or use NullPool."
        )


def _with_driver(url: URL, name: str) -> str:
    """Return the URL as it should be, with the password hidden."""
    named = url.set(drivername=f"{name}+{_DRIVERS[name][0]}")
    return named.render_as_string(hide_password=True)


def _no_url(source: object) -> str:
    """Say what to give instead of what is neither a URL nor an AsyncEngine."""
    if isinstance(source, Engine):
        name = source.url.get_backend_name()
        written = _with_driver(source.url, name) if name in _DRIVERS else EXAMPLES
        return (
            "A synchronous Engine was given. Give an AsyncEngine, of create_async_engine(), or a "
            f"URL with an asynchronous driver: {written}"
        )
    if not isinstance(source, str):
        kind = type(source).__name__
        return f"A scheduler takes a database URL or an AsyncEngine, not a {kind}. {_OF_SESSIONS}"
    return f"What was given is not a database URL. Examples: {EXAMPLES}."


def _install(url: URL, name: str) -> str:
    extra = _DRIVERS[name][1]
    install = f"pip install 'asyncjobq[{extra}]'" if extra else "pip install aiosqlite"
    return (
        f"The driver of {url.drivername!r} is not installed. {install} installs the one of "
        f"{name}+{_DRIVERS[name][0]}://…"
    )

"""The tables and their version: created, checked, upgraded; callable from Alembic.

In an Alembic migration: `asyncjobq.migrations.create_schema(op.get_bind())`.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect, select, update
from sqlalchemy.schema import CreateSchema

from asyncjobq.backends import backend_for
from asyncjobq.backends.base import Backend
from asyncjobq.backends.keys import KEY_SLOTS
from asyncjobq.errors import SchemaError
from asyncjobq.models import SCHEMA_VERSION, Tables, tables_for

__all__ = ["check_schema", "create_schema", "ensure_schema", "is_up_to_date"]


def create_schema(
    connection: Connection, schema: str | None = None, table_prefix: str = ""
) -> None:
    """Create or upgrade the tables in this connection's transaction."""
    ensure_schema(connection, backend_for(connection.dialect, tables_for(schema, table_prefix)))


def ensure_schema(connection: Connection, backend: Backend) -> None:
    """Create what is missing; does nothing, and locks nothing, when all is up to date.

    Processes that do this at the same moment wait for each other. The table of the version is
    made first and its row written last, so that half-made tables are known to be ours and are
    completed by the next call, on databases that cannot roll back DDL.
    """
    if is_up_to_date(connection, backend):
        return
    with backend.schema_lock(connection):
        version = _version(connection, backend.tables)
        if version == SCHEMA_VERSION:
            return
        _refuse_unknown(version)
        if version is None:
            _refuse_foreign(connection, backend)
        tables = backend.tables
        if tables.schema is not None:
            _create_namespace(connection, tables.schema)
        tables.version.create(connection, checkfirst=True)
        tables.metadata.create_all(connection, tables=tables.all, checkfirst=True)
        slots = [{"slot": slot} for slot in range(KEY_SLOTS)]
        backend.insert_if_absent(connection, tables.key_locks, slots)
        backend.insert_if_absent(connection, tables.version, [{"id": 1, "version": 0}])
        row = tables.version.c.id == 1
        connection.execute(update(tables.version).where(row).values(version=SCHEMA_VERSION))


def is_up_to_date(connection: Connection, backend: Backend) -> bool:
    """Tell, without a lock, whether the tables are there and of this version."""
    return _version(connection, backend.tables) == SCHEMA_VERSION


def _create_namespace(connection: Connection, schema: str) -> None:
    if not inspect(connection).has_schema(schema):
        connection.execute(CreateSchema(schema, if_not_exists=True))


def check_schema(connection: Connection, backend: Backend) -> None:
    """Raise SchemaError unless the tables are there and of this version."""
    version = _version(connection, backend.tables)
    if version == SCHEMA_VERSION:
        return
    _refuse_unknown(version)
    if version is None:
        _refuse_foreign(connection, backend)
    raise SchemaError(
        "The library's tables are missing or half-made. Create them once: "
        "`await scheduler.create_schema()`, or `asyncjobq init` on the command line."
    )


def _version(connection: Connection, tables: Tables) -> int | None:
    """Return the version of the tables; 0 while they are half-made, None where there are none."""
    if not inspect(connection).has_table(tables.version.name, schema=tables.schema):
        return None
    return connection.scalar(select(tables.version.c.version)) or 0


def _refuse_unknown(version: int | None) -> None:
    if version is not None and version > SCHEMA_VERSION:
        raise SchemaError(
            f"The tables are of version {version}, made by a newer release; this release knows "
            f"version {SCHEMA_VERSION}. Upgrade asyncjobq here before you run it."
        )


def _refuse_foreign(connection: Connection, backend: Backend) -> None:
    tables = backend.tables
    tables_there = inspect(connection)
    names = sorted(table.name for table in tables.all)
    taken = [name for name in names if tables_there.has_table(name, schema=tables.schema)]
    if taken:
        either = "Scheduler(..., schema='asyncjobq') or " if backend.has_schemas else ""
        raise SchemaError(
            f"There is a table {taken[0]!r} already, which is not asyncjobq's. Keep them apart "
            f"with {either}Scheduler(..., table_prefix='asyncjobq_')."
        )

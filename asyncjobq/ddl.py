"""What the tables are made of where databases differ: ids, partial indexes, foreign keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Dialect, ForeignKeyConstraint, Index, text
from sqlalchemy.dialects import sqlite

from asyncjobq.column_types import MYSQL_FAMILY

# SQLite gives ids that grow and are never used again only to a plain INTEGER primary key.
JobId = BigInteger().with_variant(sqlite.INTEGER(), "sqlite")
Flag = Boolean(create_constraint=False)

MYSQL: Final = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}


def _on(names: tuple[str, ...], *, but: bool = False) -> Callable[..., bool]:
    """Return the test whether DDL goes to these databases, or to all but them."""

    def fits(_ddl: Any, _target: Any, _bind: Any, *, dialect: Dialect, **_kw: Any) -> bool:
        return (dialect.name in names) != but

    return fits


def partial_index(name: str, condition: str, *columns: str) -> tuple[Index, Index]:
    """Return a partial index and, where there are none, the same led by the condition's column.

    SQLite uses a partial index only for queries that spell its condition in the same way, and has
    no boolean literals.
    """
    leading = condition.removeprefix("NOT ").split()[0]
    spelled = {"NOT settled": "settled = 0", "in_flight": "in_flight = 1"}.get(condition, condition)
    kept = Index(name, *columns, postgresql_where=text(condition), sqlite_where=text(spelled))
    plain = Index(name, *dict.fromkeys((leading, *columns)))
    kept.ddl_if(callable_=_on(MYSQL_FAMILY, but=True))
    plain.ddl_if(callable_=_on(MYSQL_FAMILY))
    return kept, plain


def unique_index(name: str, column: str) -> Index:
    """Return a unique index of the rows where the column is not NULL.

    Partial, so that PostgreSQL does not count the column among those that a foreign key might
    refer to: a write of it waits for no caller's uncommitted edge. Not on MySQL and MariaDB, where
    it would let one open transaction block all others; they have `job_keys` (mysql_keys.py).
    """
    there = text(f"{column} IS NOT NULL")
    index = Index(name, column, unique=True, postgresql_where=there, sqlite_where=there)
    index.ddl_if(callable_=_on(MYSQL_FAMILY, but=True))
    return index


def reference(column: str, target: str) -> ForeignKeyConstraint:
    """Return a foreign key, which MySQL and MariaDB must not have.

    There, a caller's uncommitted edge or child would hold a shared lock on the row of a running
    job, and block the renewal of every lease of that job's worker.
    """
    constraint = ForeignKeyConstraint([column], [target])
    constraint.ddl_if(callable_=_on(MYSQL_FAMILY, but=True))
    return constraint

"""Column types that mean the same on every database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import DateTime, Dialect, String, Text, TypeDecorator
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.types import TypeEngine, UserDefinedType

from asyncjobq import codec

MYSQL_FAMILY: Final = ("mysql", "mariadb")


class JsonText(TypeDecorator[Any]):
    """JSON kept as the text that `codec` wrote: no database reorders, rounds or re-encodes it."""

    impl = Text
    cache_ok = True
    coerce_to_is_types = ()

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(_JsonAsText())
        if dialect.name in MYSQL_FAMILY:
            return dialect.type_descriptor(
                mysql.LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin")
            )
        return dialect.type_descriptor(Text())

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else codec.encode(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        # PostgreSQL's drivers decode its JSON type themselves.
        return value if value is None or dialect.name == "postgresql" else codec.decode(value)


class _JsonAsText(UserDefinedType[Any]):
    """PostgreSQL's JSON, bound as text that is JSON already; SQLAlchemy's would encode it again."""

    cache_ok = True
    render_bind_cast = True

    def get_col_spec(self, **kw: Any) -> str:
        return "JSON"


class UtcDateTime(TypeDecorator[datetime]):
    """A moment: aware UTC in Python, with microseconds on every database."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in MYSQL_FAMILY:
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment if dialect.name == "postgresql" else moment.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


class Key(TypeDecorator[str]):
    """A string compared byte for byte, trailing spaces included, on every database."""

    impl = String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in MYSQL_FAMILY:
            mariadb = getattr(dialect, "is_mariadb", False)
            collation = "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin"
            return dialect.type_descriptor(
                mysql.VARCHAR(self.length, charset="utf8mb4", collation=collation)
            )
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.VARCHAR(self.length, collation="C"))
        return dialect.type_descriptor(String(self.length))


class LongText(TypeDecorator[str]):
    """Text without a practical bound on every database."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in MYSQL_FAMILY:
            return dialect.type_descriptor(mysql.LONGTEXT(charset="utf8mb4"))
        return dialect.type_descriptor(Text())

"""Many rows in one statement for MySQL and MariaDB: sent as JSON, read as a table.

Their drivers send one statement for each row of an executemany that is no INSERT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Text, Update, bindparam, literal_column
from sqlalchemy.ext.compiler import compiles

from asyncjobq import codec
from asyncjobq.backends import lanes
from asyncjobq.backends.base import Backend, MakeUpdate, values_of_each

LONG: Final = 50_000
"""Characters from which on a row is not sent as JSON, where texts are escaped twice."""

BATCH_ROWS: Final = 500
BATCH_BYTES: Final = 2_000_000


def parted(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the rows that are sent together, and those that are too long for it."""
    long = [row for row in rows if _length(row) > LONG]
    return [row for row in rows if _length(row) <= LONG] if long else list(rows), long


def _length(row: Mapping[str, Any]) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str))


def update_from_json(
    connection: Connection, backend: Backend, make: MakeUpdate, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Execute an UPDATE of jobs for all rows at once; each has its job's `row_id`."""
    statement = backend.built(_update, make)
    for batch in lanes.batches(rows, BATCH_ROWS, BATCH_BYTES):
        # What is left out is NULL; of a null in JSON the servers do not think alike.
        given = [{name: v for name, v in row.items() if v is not None} for row in batch]
        connection.execute(statement, {"rows": codec.encode(given)})


def _update(backend: Backend, make: MakeUpdate) -> Update:
    types = values_of_each(backend, make)
    statement = make(backend, lambda name, type_: literal_column(f"each_row.{name}", type_))
    # In this order and by primary key, so that no row is locked but these, however few there are.
    by_key = f"/*+ INDEX(`{backend.tables.jobs.name}` PRIMARY) */"  # a comment to MariaDB
    return statement.prefix_with(by_key, JsonTable(types))


class JsonTable(ColumnElement[Any]):
    """The rows of a parameter, an array of objects with values by name, to be joined with jobs."""

    inherit_cache = False

    def __init__(self, types: Mapping[str, Any]) -> None:
        self.types = dict(types)
        self.rows = bindparam("rows", type_=Text())


@compiles(JsonTable)
def _compile(element: JsonTable, compiler: Any, **options: Any) -> str:
    types = compiler.dialect.type_compiler_instance
    columns = ", ".join(
        f"{name} {types.process(type_)} PATH '$.{name}' NULL ON EMPTY ERROR ON ERROR"
        for name, type_ in element.types.items()
    )
    rows = compiler.process(element.rows, **options)
    return f"JSON_TABLE({rows}, '$[*]' COLUMNS ({columns})) AS each_row STRAIGHT_JOIN"

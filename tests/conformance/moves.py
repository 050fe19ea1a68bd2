"""The table of allowed moves, watched by SQLite itself while tests run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, text

from asyncjobq.states import MOVES


def watch_moves(connection: Connection) -> None:
    """Have SQLite refuse every move that `MOVES` does not have."""
    if connection.dialect.name != "sqlite":
        return
    moves = ", ".join(f"'{source} {target}'" for source in MOVES for target in MOVES[source])
    trigger = (
        "CREATE TRIGGER moves BEFORE UPDATE OF state ON jobs "
        f"WHEN OLD.state <> NEW.state AND OLD.state || ' ' || NEW.state NOT IN ({moves}) "
        "BEGIN SELECT RAISE(ABORT, 'a move that states.MOVES does not have'); END"
    )
    connection.execute(text(trigger))


@contextmanager
def unwatched(connection: Connection) -> Iterator[None]:
    """Let a test make any move in this block."""
    if connection.dialect.name == "sqlite":
        connection.execute(text("DROP TRIGGER IF EXISTS moves"))
    yield
    watch_moves(connection)

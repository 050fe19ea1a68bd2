"""Unique keys on MySQL and MariaDB: rows of a table of their own, and not entries of an index.

Whoever inserts a key into a unique index where it was before locks the gap before it, until the
end of the transaction. Before the first key of an index all NULLs go in, so that this would block
every other enqueue. In a table of keys alone it concerns nobody but those who ask for keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, bindparam, delete, select

from asyncjobq.backends.base import Backend

DUPLICATE: Final = 1062


class MySQLKeys(Backend):
    """The part of the backend that is about unique keys.

    Workers lock a key before they give it up, and leave alone a job whose key a caller relies on.
    """

    notes_keys = True

    def free_to_end(self, connection: Connection, rows: Sequence[Row[Any]]) -> list[Row[Any]]:
        keys = {row.unique_held for row in rows} - {None}
        relied_on = self._relied_on(connection, keys) if keys else keys
        return [row for row in rows if row.unique_held not in relied_on]

    def by_primary_key(self, query: Select[Any]) -> Select[Any]:
        return query.with_hint(self.tables.key_locks, "FORCE INDEX (PRIMARY)")

    def holds(self, connection: Connection, keys: Sequence[str]) -> ColumnElement[bool]:
        table, jobs = self.tables.keys, self.tables.jobs
        ids = connection.scalars(select(table.c.job_id).where(table.c.held.in_(keys))).all()
        return and_(jobs.c.id.in_(ids), jobs.c.unique_held.in_(keys))

    def note_keys(self, connection: Connection, held: Mapping[int, str]) -> None:
        rows = [{"held": key, "job_id": job_id} for job_id, key in held.items()]
        self.insert_rows(connection, self.tables.keys, sorted(rows, key=lambda row: row["held"]))

    def forget_keys(self, connection: Connection, job_ids: Sequence[int]) -> None:
        table, jobs = self.tables.keys, self.tables.jobs
        left = select(jobs.c.id, jobs.c.unique_key).where(
            jobs.c.id.in_(job_ids), jobs.c.unique_key.is_not(None), jobs.c.unique_held.is_(None)
        )
        rows = connection.execute(left).all()
        # One by one: what reads the table for several of them may lock others.
        one = delete(table).where(
            table.c.held == bindparam("key"), table.c.job_id == bindparam("job")
        )
        if rows:
            connection.execute(one, [{"key": row.unique_key, "job": row.id} for row in rows])

    def _relied_on(self, connection: Connection, keys: Collection[str]) -> set[str]:
        """Lock keys that are to be given up, and return those that some caller relies on."""
        held = self.tables.keys.c.held
        query = select(held).where(held.in_(sorted(keys))).order_by(held)
        by_key = query.with_hint(self.tables.keys, "FORCE INDEX (PRIMARY)")
        locked = connection.scalars(by_key.with_for_update(skip_locked=True)).all()
        # A key that is not there is given up already: its job must not wait for ever.
        return {*connection.scalars(query)} - {*locked} if len(locked) < len(keys) else set()

    def keep_holders(
        self, connection: Connection, holders: Mapping[int, str], *, wait: bool
    ) -> set[int]:
        # A job that leaves its key at its start cannot be claimed without its row here.
        return self.still_holders(connection, holders)

    def still_holders(self, connection: Connection, holders: Mapping[int, str]) -> set[int]:
        table = self.tables.keys
        # One by one: only a look at one whole key locks nothing but its row.
        one = select(table.c.job_id).where(table.c.held == bindparam("key"))
        one = one.with_for_update(read=True)
        keys = sorted(holders.values())
        found = {row.job_id for key in keys for row in connection.execute(one, {"key": key})}
        return found & holders.keys()

    def is_stale(self, error: BaseException) -> bool:
        cause = getattr(error, "orig", error)
        return bool(cause.args) and cause.args[0] == DUPLICATE

    def claim_rows(
        self,
        connection: Connection,
        ids: Sequence[int],
        values: Mapping[str, Any],
        columns: Sequence[ColumnElement[Any]],
    ) -> list[Row[Any]]:
        key = self.tables.jobs.c.unique_key
        rows = super().claim_rows(connection, ids, values, [*columns, key])
        if any(row.unique_key is not None for row in rows):
            self.forget_keys(connection, ids)
        return rows

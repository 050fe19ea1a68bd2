"""What a database must do for unique keys: locks that stall no worker, looks that are current.

What a caller's transaction locks here stays locked until it ends, so it must be nothing that a
worker waits for: neither the row of a running job, nor the index entry that its end removes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final
from zlib import crc32

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, select, text
from sqlalchemy.exc import DBAPIError

from asyncjobq.models import Tables

OWN: Final = "asyncjobq_own"
"""The execution option that tells the library's own connections from the callers'."""
KEY_SLOTS: Final = 1024
"""Rows of the table that those lock who ask for unique keys."""


class KeysBackend(ABC):
    """The part of a backend that is about unique keys."""

    one_writer: ClassVar[bool] = False
    """Whether a transaction that writes is the only one, and what it read before may be old."""
    notes_keys: ClassVar[bool] = False
    """Whether `note_keys` has something to do."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    @abstractmethod
    def insert_if_absent(
        self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Insert rows, leaving those whose primary key exists as they are."""

    def by_primary_key(self, query: Select[Any]) -> Select[Any]:
        """Return a query of the table of slots so that it reads no other row."""
        return query

    def holds(self, connection: Connection, keys: Sequence[str]) -> ColumnElement[bool]:
        """Return the condition that a job holds one of these keys."""
        return self.tables.jobs.c.unique_held.in_(keys)

    def note_keys(self, connection: Connection, held: Mapping[int, str]) -> None:  # noqa: B027
        """Note that jobs hold keys from now on, where their rows alone do not enforce it."""

    def forget_keys(self, connection: Connection, job_ids: Sequence[int]) -> None:  # noqa: B027
        """Forget the keys of those of these jobs that hold them no more."""

    def free_to_end(self, _connection: Connection, rows: Sequence[Row[Any]]) -> list[Row[Any]]:
        """Return of these locked rows those whose `unique_held` can be given up now."""
        return list(rows)

    def lock_keys(
        self, connection: Connection, keys: Sequence[str], *, wait: bool = True
    ) -> set[str]:
        """Keep others from asking for these unique keys until this transaction ends.

        Returns the keys locked: without `wait`, all that nobody else asks for. What is locked is
        not the keys but their slots, a bounded number of rows that exist, always in one order:
        locks on the keys themselves would deadlock where one transaction is rolled back while
        others wait for it.
        """
        slots = {key: crc32(key.encode()) % KEY_SLOTS for key in keys}
        wanted = sorted(set(slots.values()))
        locked = self._lock_slots(connection, wanted, wait=wait)
        if len(locked) < len(wanted) and self._bring_back_slots(connection, wanted):
            locked = self._lock_slots(connection, wanted, wait=wait)
        return {key for key in keys if slots[key] in locked}

    def _lock_slots(self, connection: Connection, wanted: Sequence[int], *, wait: bool) -> set[int]:
        slot = self.tables.key_locks.c.slot
        query = self.by_primary_key(select(slot).where(slot.in_(wanted)).order_by(slot))
        query = query.with_for_update(key_share=True, skip_locked=not wait)
        return set(connection.scalars(query))

    def _bring_back_slots(self, connection: Connection, wanted: Sequence[int]) -> bool:
        """Insert the slots that somebody has deleted, who emptied all tables; tell whether any."""
        slot = self.tables.key_locks.c.slot
        there = set(connection.scalars(select(slot).where(slot.in_(wanted))))
        missing = [{"slot": number} for number in wanted if number not in there]
        if missing:
            self.insert_if_absent(connection, self.tables.key_locks, missing)
        return bool(missing)

    def reads_fresh(self, connection: Connection) -> bool:
        """Tell whether each statement of this transaction sees what was committed before it."""
        own = OWN in connection.get_execution_options()
        return own or connection.get_isolation_level() in ("READ COMMITTED", "READ UNCOMMITTED")

    def reads_committed(self, connection: Connection) -> bool:
        """Tell whether each statement sees what was committed before it, and nothing else."""
        if OWN in connection.get_execution_options():
            return True
        return connection.get_isolation_level() == "READ COMMITTED"

    @abstractmethod
    def keep_holders(
        self, connection: Connection, holders: Mapping[int, str], *, wait: bool
    ) -> set[int]:
        """Keep jobs from being started until this transaction ends, given with their unique keys.

        Returns those that hold them. Without `wait`, those locked elsewhere are left out.
        """

    @abstractmethod
    def still_holders(self, connection: Connection, holders: Mapping[int, str]) -> set[int]:
        """Return which jobs hold their keys at this moment, whatever the snapshot shows.

        Raises what `is_stale` knows if that cannot be told.
        """

    def wait_to_lock(
        self, connection: Connection, job_id: int, *conditions: ColumnElement[bool]
    ) -> bool:
        """Lock a job if it meets conditions, waiting for whoever holds it; tell whether it does."""
        query = select(self.tables.jobs.c.id).where(self.tables.jobs.c.id == job_id, *conditions)
        locked = connection.execute(query.with_for_update(key_share=True))
        return locked.one_or_none() is not None

    def is_stale(self, error: BaseException) -> bool:
        """Tell whether an error means that this transaction's snapshot is too old for a write."""
        return False

    @contextmanager
    def savepoint(self, connection: Connection) -> Iterator[None]:
        """Undo what the block has written, if its error is one that leaves the transaction."""
        connection.execute(text("SAVEPOINT asyncjobq"))
        try:
            yield
        except DBAPIError as error:
            if self.is_stale(error):
                connection.execute(text("ROLLBACK TO SAVEPOINT asyncjobq"))
            raise
        connection.execute(text("RELEASE SAVEPOINT asyncjobq"))

"""What is to be done once a session of the caller's has committed, and never if it has not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

PENDING: Final = "asyncjobq_pending"


@dataclass
class _Pending:
    """Something that waits for the commits of all these transactions, savepoints first."""

    call: Callable[[], None]
    connection: Connection
    transactions: list[SessionTransaction]


def once_committed(session: Session, connection: Connection, call: Callable[[], None]) -> None:
    """Call something once, after the session's transaction in progress has been committed.

    Not if that, or a savepoint in which this was asked for, is rolled back; nor if the session was
    put into a transaction that somebody else began on its connection, who alone knows its end.
    """
    if PENDING not in session.info:
        session.info[PENDING] = []
        event.listen(session, "after_commit", _committed)
        event.listen(session, "after_transaction_end", _ended)
    waiting = _Pending(call, connection, list(_open_transactions(session)))
    session.info[PENDING].append(waiting)


def _open_transactions(session: Session) -> Iterator[SessionTransaction]:
    transaction = session.get_nested_transaction() or session.get_transaction()
    while transaction is not None:
        if transaction.nested or transaction.parent is None:
            yield transaction
        transaction = transaction.parent


def _committed(session: Session) -> None:
    """Note the commit of the innermost savepoint, or of the whole; runs before it is ended."""
    done = next(_open_transactions(session))
    pending: list[_Pending] = session.info[PENDING]
    for one in [one for one in pending if done in one.transactions]:
        one.transactions.remove(done)
        if not one.transactions:
            pending.remove(one)
            if not one.connection.in_transaction():
                one.call()


def _ended(session: Session, transaction: SessionTransaction) -> None:
    """Forget what waited for a transaction that ended without a commit."""
    pending: list[_Pending] = session.info[PENDING]
    pending[:] = [one for one in pending if transaction not in one.transactions]

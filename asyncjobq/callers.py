"""Work inside a transaction that is the caller's: never begun, committed or repeated here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from asyncjobq.backends.base import OWN
from asyncjobq.errors import ConfigurationError
from asyncjobq.models import JobRow
from asyncjobq.wake import ring_all

T = TypeVar("T")

AsyncCaller = AsyncSession | AsyncConnection
SyncCaller = Session | Connection

_AWAITED: Final = "asyncjobq_awaited"
"""The key under which a session keeps who waits for its commit."""

_CONNECTIONS: WeakKeyDictionary[Connection, list[Callable[[], None]]] = WeakKeyDictionary()

COMMIT_TAKES: Final = 0.05
"""Seconds from the moment at which a connection tells of its commit, which is before it."""


async def in_transaction_of(caller: AsyncCaller, work: Callable[[Connection], T]) -> T:
    """Run `work` on the connection of the caller's transaction."""
    if isinstance(caller, AsyncSession):
        return await caller.run_sync(lambda session: in_sync_transaction_of(session, work))
    if isinstance(caller, AsyncConnection):
        return await caller.run_sync(lambda connection: in_sync_transaction_of(connection, work))
    raise _unfit(caller, "an AsyncSession or AsyncConnection")


def in_sync_transaction_of(caller: SyncCaller, work: Callable[[Connection], T]) -> T:
    """Run `work` on the connection of the caller's transaction, and ring when that commits."""
    if isinstance(caller, Session):
        # By our own model, for sessions that bind models to different databases.
        connection = caller.connection(bind_arguments={"mapper": JobRow})
    elif isinstance(caller, Connection):
        connection = caller
    else:
        raise _unfit(caller, "a Session or Connection")
    result = work(connection)
    _ring_at_commit(caller)
    return result


def _is_sync(caller: object) -> bool:
    return isinstance(caller, Session | Connection)


def refuse_autocommit(connection: Connection, reason: str) -> None:
    """Raise ConfigurationError for a connection of a caller that has no transactions."""
    if OWN in connection.get_execution_options():
        return
    of_engine = getattr(connection.dialect, "_on_connect_isolation_level", None)
    if connection.get_execution_options().get("isolation_level", of_engine) == "AUTOCOMMIT":
        raise ConfigurationError(f"{reason} Use a connection or session that has transactions.")


def when_committed(caller: AsyncCaller | SyncCaller, then: Callable[[], None]) -> None:
    """Call `then` when what was just written is committed, and never if it is rolled back."""
    if isinstance(caller, AsyncSession):
        caller = caller.sync_session
    if isinstance(caller, Session):
        _when_session_committed(caller, then)
    elif connection := _sync_connection(caller):
        _when_connection_committed(connection, then)


def _sync_connection(caller: AsyncConnection | Connection) -> Connection | None:
    return caller.sync_connection if isinstance(caller, AsyncConnection) else caller


def _when_session_committed(session: Session, then: Callable[[], None]) -> None:
    if _AWAITED not in session.info:
        session.info[_AWAITED] = []
        event.listen(session, "after_commit", _session_committed)
        event.listen(session, "after_soft_rollback", _session_rolled_back)
    transactions: list[Any] = []  # the innermost, and those around it
    inner: Any = session.get_nested_transaction() or session.get_transaction()
    while inner is not None:
        transactions.append(inner)
        inner = inner.parent
    session.info[_AWAITED].append((transactions, then))


def _session_committed(session: Session) -> None:
    if session.in_nested_transaction():
        return
    root = session.get_transaction()
    for transactions, then in session.info[_AWAITED]:
        if root in transactions:  # else that one was closed, and this is a later one
            then()
    session.info[_AWAITED] = []


def _session_rolled_back(session: Session, ended: Any) -> None:
    kept = [item for item in session.info[_AWAITED] if ended not in item[0]]
    session.info[_AWAITED] = kept


def _when_connection_committed(connection: Connection, then: Callable[[], None]) -> None:
    """Take the rollback of any savepoint for that of the whole transaction."""
    if connection not in _CONNECTIONS:
        _CONNECTIONS[connection] = []
        event.listen(connection, "commit", _connection_committed)
        for name in ("rollback", "rollback_savepoint"):
            event.listen(connection, name, _connection_rolled_back)
    _CONNECTIONS[connection].append(then)


def _connection_committed(connection: Connection) -> None:
    awaited, _CONNECTIONS[connection] = _CONNECTIONS[connection], []
    for then in awaited:
        then()


def _connection_rolled_back(connection: Connection, *_: object) -> None:
    _CONNECTIONS[connection] = []


def _unfit(caller: object, wanted: str) -> ConfigurationError:
    hint = "; enqueue_sync() and complete_sync() take it" if _is_sync(caller) else ""
    return ConfigurationError(f"session takes {wanted}, not a {type(caller).__name__}{hint}.")


def _ring_at_commit(caller: SyncCaller) -> None:
    """Wake this process's workers at each commit from now on; a ring too many costs one look."""
    of_session = isinstance(caller, Session)
    name, ring = ("after_commit", _ring) if of_session else ("commit", _ring_soon)
    if not event.contains(caller, name, ring):
        event.listen(caller, name, ring)


def _ring(_: Session) -> None:
    ring_all()


def _ring_soon(_: Connection) -> None:
    ring_all(COMMIT_TAKES)

"""Work inside a transaction that is the caller's: never begun, committed or repeated here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from asyncjobq.backends.base import Backend
from asyncjobq.backends.keys import OWN
from asyncjobq.commits import once_committed
from asyncjobq.errors import ConfigurationError
from asyncjobq.models import JobRow
from asyncjobq.wake import ring_all

T = TypeVar("T")

AsyncCaller = AsyncSession | AsyncConnection
SyncCaller = Session | Connection

_CONNECTIONS: WeakKeyDictionary[Connection, list[Callable[[], None]]] = WeakKeyDictionary()

COMMIT_TAKES: Final = 0.05
"""Seconds from the moment at which a connection tells of its commit, which is before it."""


async def in_transaction_of(
    caller: AsyncCaller,
    work: Callable[[Connection], T],
    committed: Callable[[T], None] | None = None,
) -> T:
    """Run `work` on the connection of the caller's transaction.

    `committed` is called with its result once a session has committed it; a connection's commit
    is told before it happens, so `committed` is not called for one.
    """
    if isinstance(caller, AsyncSession | AsyncConnection):
        return await caller.run_sync(lambda own: in_sync_transaction_of(own, work, committed))
    raise _unfit(caller, "an AsyncSession or AsyncConnection")


def in_sync_transaction_of(
    caller: SyncCaller,
    work: Callable[[Connection], T],
    committed: Callable[[T], None] | None = None,
) -> T:
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
    if committed is not None and isinstance(caller, Session):
        once_committed(caller, connection, partial(committed, result))
    return result


def refuse_autocommit(connection: Connection, backend: Backend, reason: str) -> None:
    """Raise ConfigurationError for a connection of a caller that has no transactions."""
    if OWN in connection.get_execution_options():
        return
    of_engine = getattr(connection.dialect, "_on_connect_isolation_level", None)
    level = connection.get_execution_options().get("isolation_level", of_engine)
    if level == "AUTOCOMMIT" or backend.commits_at_once(connection):
        raise ConfigurationError(f"{reason} Use a connection or session that has transactions.")


def when_committed(connection: Connection, then: Callable[[], None]) -> None:
    """Call `then` with the commit of a connection's transaction, which is told before it happens.

    The rollback of any savepoint counts as that of the whole.
    """
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


def _is_sync(caller: object) -> bool:
    return isinstance(caller, Session | Connection)


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

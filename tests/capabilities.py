"""What some databases can do and others cannot, as `@pytest.mark.requires(...)` names it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Capability:
    """Which backends have it, and why the others do not."""

    backends: frozenset[str]
    otherwise: str


CAPABILITIES: Final = {
    "listen": Capability(frozenset({"postgresql"}), "this database cannot notify another process"),
    "wake": Capability(
        frozenset({"sqlite", "postgresql"}), "this database tells no other process of a commit"
    ),
    "row_locks": Capability(
        frozenset({"postgresql", "mysql", "mariadb"}), "this database locks as a whole"
    ),
    "key_locks": Capability(
        frozenset({"postgresql"}), "no foreign key locks here what it refers to"
    ),
    "server": Capability(
        frozenset({"postgresql", "mysql", "mariadb"}), "this database has no server"
    ),
    "file_database": Capability(frozenset({"sqlite"}), "this database is not a file"),
}


def missing_capability(backend: str, names: Iterable[str]) -> str | None:
    """Return why a backend cannot run a test that requires these, or None."""
    for name in names:
        if name not in CAPABILITIES:
            raise ValueError(f"no capability {name!r}; known: {', '.join(CAPABILITIES)}")
        if backend not in CAPABILITIES[name].backends:
            return f"requires {name}: {CAPABILITIES[name].otherwise}"
    return None

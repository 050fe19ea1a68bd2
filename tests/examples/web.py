"""A web example in a process of its own, as its users' clients see it."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from examples.programs import EXAMPLES, Place, Program, wait_for
from throwaway import free_port


@dataclass
class Web:
    """A web application that answers."""

    program: Program
    client: httpx.Client
    database: Path

    def count(self, table: str) -> int:
        """Return how many rows a table of its database has."""
        with closing(sqlite3.connect(self.database)) as connection:
            number: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            return number

    def when_done(self, path: str) -> dict[str, Any]:
        """Return what is at this path as soon as its job is done."""

        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.client.get(path).raise_for_status().json()
            return found if found["state"] == "done" else None

        return wait_for(look, f"{path} is done")

    def interrupt(self) -> None:
        """Press Ctrl-C, as it were: the program ends soon, in good order."""
        self.program.signal(signal.SIGINT)
        assert self.program.exit_code() == 0, self.program.output
        self.program.check_output()


@contextmanager
def serving(place: Place, example: str, **more: str) -> Iterator[Web]:
    """Run a web example until it answers."""
    port, database = free_port(), place.folder / "web.db"
    url = f"sqlite+aiosqlite:///{database}"
    variables = {"DATABASE_URL": url, "PORT": str(port), **more}
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
        place.running(str(EXAMPLES / example), **variables) as program,
    ):

        def answers() -> bool:
            assert program.process.poll() is None, program.output
            try:
                return client.get("/").status_code == 404
            except httpx.TransportError:
                return False

        wait_for(answers, f"{example} answers")
        yield Web(program, client, database)

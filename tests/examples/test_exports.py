"""A web process that only enqueues, and workers from the command line, over real HTTP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from examples.programs import COMMAND, EXAMPLES, Place, Program, wait_for
from examples.web import Web, serving

WORKER = (*COMMAND, "worker", "exports_jobs:scheduler", "--app-dir", str(EXAMPLES))
LONG = 600_000


@pytest.fixture
def web(place: Place) -> Iterator[Web]:
    """Give the web process."""
    with serving(place, "exports_web.py") as running:
        yield running


@contextmanager
def working(place: Place, web: Web, name: str) -> Iterator[Program]:
    """Run a worker beside the block."""
    variables = {"DATABASE_URL": f"sqlite+aiosqlite:///{web.database}"}
    exports = str(place.folder / "exports")
    with place.running(*WORKER, log=name, EXPORTS=exports, **variables) as program:
        yield program


def order(web: Web, owner: str, rows: int = 5) -> dict[str, Any]:
    """Order an export."""
    answer = web.client.post("/exports", params={"owner": owner, "rows": rows})
    assert answer.status_code == 202, answer.text
    told: dict[str, Any] = answer.json()
    return told


def read(web: Web, job_id: int, wait: int = 0) -> dict[str, Any]:
    """Ask for an export, perhaps for its end."""
    answer = web.client.get(f"/exports/{job_id}", params={"wait": wait}, timeout=90)
    told: dict[str, Any] = answer.raise_for_status().json()
    return told


def test_orders_wait_for_a_worker(web: Web, place: Place) -> None:
    assert order(web, "ada") == {"export": 1, "new": True}
    assert order(web, "ada") == {"export": 1, "new": False}
    assert read(web, 1)["state"] == "ready", "nobody works here"
    with working(place, web, "worker") as worker:
        done = read(web, 1, wait=60)
        assert (done["state"], done["file"]) == ("done", "1.csv"), worker.output
        assert (done["progress"]["done"], done["progress"]["total"]) == (5, 5)
        assert (place.folder / "exports" / "1.csv").read_text().splitlines()[4] == "4,ada"
        assert order(web, "ada") == {"export": 2, "new": True}, "the first is over"
        assert read(web, 2, wait=60)["state"] == "done"
        worker.signal(signal.SIGTERM)
        assert worker.exit_code() == 0, worker.output
        worker.check_output()
    assert web.client.get("/exports/99").status_code == 404
    web.interrupt()
    assert place.left_behind == []


def test_cancelled_while_it_is_written(web: Web, place: Place) -> None:
    order(web, "ada", LONG)
    with working(place, web, "worker") as worker:
        wait_for(lambda: read(web, 1)["progress"], "the export is being written")
        assert web.client.delete("/exports/1").json() == {"cancelled": "requested"}
        assert read(web, 1, wait=60)["state"] == "cancelled", worker.output
        worker.signal(signal.SIGTERM)
        assert worker.exit_code() == 0, worker.output
    assert list((place.folder / "exports").iterdir()) == []


def test_what_a_killed_worker_had_is_done_by_another(web: Web, place: Place) -> None:
    order(web, "ada", 3000)
    with working(place, web, "first") as first:
        wait_for(lambda: read(web, 1)["state"] in ("leased", "running"), "the export is begun")
        first.signal(signal.SIGKILL)
        first.exit_code()
    with working(place, web, "second") as second:
        assert read(web, 1, wait=60)["state"] == "done", second.output
        assert "was reclaimed: its lease had run out" in second.output
    assert len((place.folder / "exports" / "1.csv").read_text().splitlines()) == 3000

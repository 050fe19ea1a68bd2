"""A short run of faults on each database; `python -m tests.faults` makes long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.workers import prepare_forks
from faults.run import Run
from faults.schedule import CONNECTIONS, FILE, PROCESSES, SERVER, faults_of
from servers import Servers

SECONDS = 8.0


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    """Make ready what worker processes are forked from."""
    prepare_forks()


async def test_nothing_is_lost_or_finalized_twice(
    backend_name: str, database_url: str, tmp_path: Path, servers: Servers
) -> None:
    process = servers.get(backend_name).process
    run = Run(database_url, tmp_path, seed=1, seconds=SECONDS, server=process, clean_only=True)
    await run.go()
    print(run.summary())
    assert run.problems == []
    assert run.figures["checks"] >= 1


def test_a_seed_always_gives_the_same_faults() -> None:
    servers = PROCESSES | CONNECTIONS | SERVER
    faults = faults_of(7, 900.0, servers, slots=4)
    assert faults == faults_of(7, 900.0, servers, slots=4)
    assert faults != faults_of(8, 900.0, servers, slots=4)
    others = faults_of(7, 900.0, PROCESSES | FILE, slots=4)
    kept = [fault for fault in others if fault.kind in PROCESSES]
    assert kept == [fault for fault in faults if fault.kind in PROCESSES]

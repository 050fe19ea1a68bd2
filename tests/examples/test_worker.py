"""`asyncjobq worker`, as a process that is sent signals."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from asyncjobq import Scheduler
from examples.programs import COMMAND, START_WITHIN, Place, wait_for
from throwaway import free_port

JOBS = """
import asyncio, os, time
from asyncjobq import Scheduler

def make_scheduler():
    url = os.environ["ASYNCJOBQ_URL"]
    scheduler = Scheduler(url, concurrency=9, poll_interval=0.1, lease_ttl=3)

    @scheduler.handler
    async def nap(seconds: float) -> None:
        print("nap begins", flush=True)
        await asyncio.sleep(seconds)
        print("nap is over", flush=True)

    @scheduler.handler
    def sleep(seconds: float) -> None:
        print("sleep begins", flush=True)
        time.sleep(seconds)

    return scheduler
"""
WORKER = (*COMMAND, "worker", "jobs:make_scheduler")


@pytest.fixture
def jobs_place(place: Place) -> Place:
    """Give a place with jobs.py in its current directory."""
    (place.current / "jobs.py").write_text(JOBS)
    return place


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Give the URL of a database file that is not there yet."""
    return f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"


async def test_until_idle(jobs_place: Place, url: str) -> None:
    await enqueue_jobs(url, "nap", 0.01, "default", "default", "other")
    with jobs_place.running(*WORKER, "--until-idle", ASYNCJOBQ_URL=url) as program:
        assert program.exit_code(within=START_WITHIN) == 0, program.output
        assert program.output.endswith("Nothing is left to run: 2 done.\n")
        program.check_output()
    assert await ready_jobs(url) == [("other", 0)]


async def test_until_idle_ends_when_it_is_told_to(jobs_place: Place, url: str) -> None:
    await enqueue_jobs(url, "nap", 600.0, "default")
    with jobs_place.running(*WORKER, "--until-idle", ASYNCJOBQ_URL=url) as program:
        program.wait_for_output("nap begins")
        program.signal(signal.SIGINT)  # two of one kind may arrive as one
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 0, program.output
        assert program.output.endswith("Stopped: no job has ended.\n")
    assert await ready_jobs(url) == [("default", 0)]


async def test_on_a_terminal_the_last_line_says_what_runs(jobs_place: Place, url: str) -> None:
    """And nothing of what a job is called acts on the terminal."""
    await enqueue_jobs(url, "nap", 600.0, "default")
    with jobs_place.on_terminal(*WORKER, ASYNCJOBQ_URL=url) as program:
        program.wait_for_output("1/9 run · 0 done · 0 failed · 0 cancelled · nap 1 for")
        assert " serves the queues default and the types nap, sleep.\n" in program.output
        program.signal(signal.SIGINT)  # two of one kind may arrive as one
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 0, program.output
        program.check_output()
    assert await ready_jobs(url) == [("default", 0)]


async def test_no_line_where_the_application_logs_by_itself(jobs_place: Place, url: str) -> None:
    own = "import logging, sys\nlogging.basicConfig(level=20, stream=sys.stdout)\n"
    (jobs_place.current / "jobs.py").write_text(own + JOBS)
    await enqueue_jobs(url, "nap", 600.0, "default")
    with jobs_place.on_terminal(*WORKER, ASYNCJOBQ_URL=url) as program:
        program.wait_for_output("nap begins")
        assert "INFO:asyncjobq.worker:Worker " in program.output
        program.signal(signal.SIGINT)  # two of one kind may arrive as one
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 0, program.output
        assert "9 run" not in program.output


async def enqueue_jobs(url: str, type_name: str, seconds: float, *queues: str) -> None:
    """Enqueue a job into each of these queues."""
    async with Scheduler(url) as scheduler:
        await scheduler.create_schema()
        for queue in queues:
            await scheduler.enqueue(type_name, {"seconds": seconds}, queue=queue)


async def ready_jobs(url: str) -> list[tuple[str, int]]:
    """Return queue and attempt of the jobs that are ready."""
    async with Scheduler(url) as scheduler:
        return [(job.queue, job.attempt) for job in await scheduler.find(state="ready")]


async def test_terminated_worker_lets_its_jobs_end(jobs_place: Place, url: str) -> None:
    await enqueue_jobs(url, "nap", 1.0, "a", "b", "b", "c")
    options = ("--queues", "a, b", "--concurrency", "2")
    with jobs_place.running(*WORKER, *options, ASYNCJOBQ_URL=url) as program:
        wait_for(lambda: program.output.count("nap begins") == 2, "two jobs have started")
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 0, program.output
        assert program.output.count("nap begins") == program.output.count("nap is over") == 2
        assert "serves the queues a, b" in program.output
        program.check_output()
    assert await ready_jobs(url) == [("b", 0), ("c", 0)]


async def test_second_signal_ends_at_once(jobs_place: Place, url: str) -> None:
    await enqueue_jobs(url, "nap", 600.0, "default")
    with jobs_place.running(*WORKER, ASYNCJOBQ_URL=url) as program:
        program.wait_for_output("nap begins")
        program.signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            program.exit_code(within=0.5)
        program.signal(signal.SIGINT)
        assert program.exit_code() == 0, program.output
        program.check_output()
    assert await ready_jobs(url) == [("default", 0)]


async def test_thread_that_cannot_be_interrupted_holds_nothing(jobs_place: Place, url: str) -> None:
    await enqueue_jobs(url, "sleep", 600.0, "default")
    with jobs_place.running(*WORKER, ASYNCJOBQ_URL=url) as program:
        program.wait_for_output("sleep begins")
        program.signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            program.exit_code(within=0.5)
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 0, program.output
        program.check_output()


def test_terminated_while_the_database_is_away(jobs_place: Place) -> None:
    url = f"postgresql+asyncpg://nobody@127.0.0.1:{free_port()}/none"
    with jobs_place.running(*WORKER, ASYNCJOBQ_URL=url) as program:
        program.wait_for_output("cannot be reached")
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 0, program.output
        program.check_output()

"""The pytest plugin of asyncjobq: fixtures for tests of programs that enqueue jobs.

    @pytest.fixture
    def job_app():
        return shop.scheduler

    async def test_an_order_is_invoiced(assert_enqueued, drain):
        await shop.place_order("tea")
        await assert_enqueued("write_invoice", args={"product": "tea"})
        await drain()

Beside the package and not in it, for pytest imports this at each start, also where no test has to
do with jobs: the package itself is imported by the first fixture that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "The fixtures of asyncjobq are for pytest, which is not installed: "
        "pip install 'asyncjobq[testing]'. With another test runner, use "
        "asyncjobq.testing.JobTester.",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from asyncjobq import Scheduler
    from asyncjobq.testing import JobClock, JobTester


@pytest.fixture
def job_app() -> Any:
    """Return what has the jobs: a Scheduler, Handlers, or several of them. To be overridden."""
    return ()


@pytest.fixture
def job_database() -> Any:
    """Return the database of the tests, a URL or an AsyncEngine; None is a temporary SQLite file.

    To be overridden. The tables there are emptied before and after each test.
    """
    return None


@pytest.fixture
def job_tester(job_app: Any, job_database: Any) -> Iterator[JobTester]:
    """Give all that the other fixtures have, in one object: `asyncjobq.testing.JobTester`."""
    from asyncjobq.testing import JobTester  # noqa: PLC0415  not before it is needed

    with JobTester(job_app, job_database) as tester:
        yield tester


@pytest.fixture
def job_scheduler(job_tester: JobTester) -> Scheduler:
    """Return the scheduler under test: the application's, on the database of the tests."""
    return job_tester.scheduler


@pytest.fixture
def drain(job_tester: JobTester) -> Callable[..., Any]:
    """Run all jobs that can run: `await drain()`; raises what a handler raises."""
    return job_tester.drain


@pytest.fixture
def run_one(job_tester: JobTester) -> Callable[..., Any]:
    """Run the next job for one attempt and return it: `job = await run_one()`."""
    return job_tester.run_one


@pytest.fixture
def assert_enqueued(job_tester: JobTester) -> Callable[..., Any]:
    """Assert that there is such a job: `await assert_enqueued("resize", args={"width": 9})`."""
    return job_tester.assert_enqueued


@pytest.fixture
def assert_not_enqueued(job_tester: JobTester) -> Callable[..., Any]:
    """Assert that no such job was enqueued: `await assert_not_enqueued("resize")`."""
    return job_tester.assert_not_enqueued


@pytest.fixture
def job_clock(job_tester: JobTester) -> JobClock:
    """Return the clock by which jobs are due: `job_clock.move(timedelta(days=1))`."""
    return job_tester.clock


@pytest.fixture
def job_context(job_tester: JobTester) -> Callable[..., Any]:
    """Make a context to call a handler with: `await resize(await job_context(), "a.png")`."""
    return job_tester.context


@pytest.fixture
def inline_jobs(job_tester: JobTester) -> JobTester:
    """Run jobs as soon as they are committed, in this test."""
    job_tester.inline()
    return job_tester

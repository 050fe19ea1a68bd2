"""Resources for handlers: what provides them, how often they are opened, when they are closed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from asyncjobq import ArgumentsError, HandlerError, Handlers, JobContext, constant, inject
from asyncjobq.injection import Resources
from asyncjobq.outcomes import Ending
from asyncjobq.run import Stop
from asyncjobq.states import State
from conformance.kit import Jobs
from conformance.running import serving
from conformance.runs import ended, outcome_of, run_of


class Log(list[str]):
    """What was opened and closed."""

    def opening(self, name: str, scope: Any = "scheduler", **needs: Any) -> Any:
        """Return the default for a parameter: a resource that notes its life here."""

        async def provider() -> AsyncIterator[str]:
            self.append(f"open {name}")
            try:
                yield name
            except BaseException as error:
                self.append(f"{name} sees {type(error).__name__}")
                raise
            finally:
                self.append(f"close {name}")

        return inject(provider, scope=scope, **needs)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
async def resources() -> AsyncIterator[Resources]:
    made = Resources()
    yield made
    async with asyncio.timeout(10):
        await made.aclose()


class Opened:
    """A context manager, of both kinds or of one."""

    def __init__(self) -> None:
        self.closed = False

    async def __aenter__(self) -> str:
        return "entered"

    async def __aexit__(self, *_: object) -> None:
        self.closed = True


class OpenedPlainly:
    def __enter__(self) -> str:
        return "entered"

    def __exit__(self, *_: object) -> None: ...


async def _generator() -> AsyncIterator[str]:
    yield "entered"


def _plain_generator() -> Iterator[str]:
    yield "entered"


async def _coroutine() -> str:
    return "entered"


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper() -> Any:
        return function()

    return wrapper


class TestProviders:
    @pytest.mark.parametrize("scope", ["scheduler", "job"])
    @pytest.mark.parametrize(
        "provider",
        [
            _generator,
            _plain_generator,
            contextlib.asynccontextmanager(_generator),
            contextlib.contextmanager(_plain_generator),
            _coroutine,
            lambda: "entered",
            lambda unused="default": "entered",
            Opened,
            OpenedPlainly,
            _wrapped(_generator),
            functools.partial(_generator),
            functools.partial(lambda value: value, "entered"),
        ],
    )
    async def test_of_every_kind(self, resources: Resources, provider: Any, scope: Any) -> None:
        async def work(value: str = inject(provider, scope=scope)) -> str:
            return value

        def work_in_a_thread(value: str = inject(provider, scope=scope)) -> str:
            return value

        for function in (work, work_in_a_thread):
            assert (await outcome_of(function, resources=resources)).result == '"entered"'

    async def test_stored_arguments_are_given_beside_them(self, resources: Resources) -> None:
        def work(
            ctx: JobContext, a: int, value: str = inject(_coroutine), *, b: int = 1, **more: int
        ) -> list[Any]:
            return [ctx.job_id, a, value, b, more]

        outcome = await outcome_of(work, args='{"a": 3, "c": 4}', resources=resources)
        assert outcome.result == '[1,3,"entered",1,{"c":4}]'

    async def test_may_need_others_and_the_context(self, log: Log, resources: Resources) -> None:
        async def pool() -> AsyncIterator[str]:
            log.append("open pool")
            yield "pool"
            log.append("close pool")

        def connection(
            ctx: JobContext, of: str = inject(pool), again: str = inject(pool)
        ) -> Iterator[str]:
            log.append("open connection")
            yield f"{of} {again} for job {ctx.job_id}"
            log.append("close connection")

        async def work(
            one: str = inject(connection, scope="job"), two: str = inject(connection, scope="job")
        ) -> list[str]:
            log.append("work")
            return [one, two]

        outcome = await outcome_of(work, resources=resources)
        assert outcome.result == '["pool pool for job 1","pool pool for job 1"]'
        await resources.aclose()
        expected = ["open pool", "open connection", "work", "close connection", "close pool"]
        assert log == expected


class TestScopes:
    async def test_of_the_scheduler_is_opened_once(self, log: Log, resources: Resources) -> None:
        shared, go_on = log.opening("shared"), asyncio.Event()

        async def slow() -> AsyncIterator[str]:
            log.append("open slow")
            await go_on.wait()
            yield "slow"
            log.append("close slow")

        async def work(one: str = shared, two: str = inject(slow)) -> str:
            return f"{one} {two}"

        runs = [asyncio.ensure_future(outcome_of(work, resources=resources)) for _ in range(5)]
        await asyncio.sleep(0.01)
        go_on.set()
        assert {(await run).result for run in runs} == {'"shared slow"'}
        assert log == ["open shared", "open slow"]
        await resources.aclose()
        assert log[2:] == ["close slow", "close shared"]

    async def test_of_the_job_is_opened_for_each(self, log: Log, resources: Resources) -> None:
        async def work(one: str = log.opening("own", "job")) -> str:
            log.append("work")
            return one

        for _ in range(2):
            assert (await outcome_of(work, resources=resources)).result == '"own"'
        assert log == ["open own", "work", "close own"] * 2

    async def test_a_cancelled_job_does_not_cut_the_opening_off_for_others(
        self, log: Log, resources: Resources
    ) -> None:
        go_on = asyncio.Event()

        async def slow() -> str:
            log.append("open")
            await go_on.wait()
            return "slow"

        async def work(value: str = inject(slow)) -> str:
            return value

        cut = await outcome_of(work, resources=resources, timeout=0.02)
        assert cut.ending == Ending.TIMED_OUT
        other = asyncio.ensure_future(outcome_of(work, resources=resources))
        await asyncio.sleep(0)
        go_on.set()
        assert (await other).result == '"slow"'
        assert log == ["open"]

    async def test_nothing_of_a_jobs_context_stays_in_it(self, resources: Resources) -> None:
        tenant: ContextVar[str] = ContextVar("tenant", default="nobody")

        async def around(_: Any, call: Any) -> Any:
            tenant.set("of the first job")
            return await call()

        async def work(
            value: str = inject(tenant.get), own: str = inject(tenant.get, scope="job")
        ) -> Any:
            return [value, own]

        outcome = await outcome_of(work, resources=resources, around=[around])
        assert outcome.result == '["nobody","of the first job"]'

    async def test_what_must_be_left_by_its_own_task_is(self, resources: Resources) -> None:
        async def group() -> AsyncIterator[asyncio.TaskGroup]:
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                yield tasks

        async def work(tasks: asyncio.TaskGroup = inject(group)) -> str:
            return await tasks.create_task(_coroutine())

        assert (await outcome_of(work, resources=resources)).result == '"entered"'


class TestErrors:
    async def test_one_that_raises_fails_its_job_only(self, resources: Resources) -> None:
        calls: list[int] = []

        async def flaky() -> str:
            calls.append(1)
            if len(calls) == 1:
                raise ConnectionError("not yet")
            return "there"

        async def work(value: str = inject(flaky)) -> str:
            return value

        first = await outcome_of(work, resources=resources)
        assert (first.ending, first.retry_after) == (Ending.FAILED, 7.0)
        assert "ConnectionError: not yet" in (first.error or "")
        assert (await outcome_of(work, resources=resources)).result == '"there"'
        assert (await outcome_of(work, resources=resources)).result == '"there"'
        assert len(calls) == 2
        rules = {"fail_on": ConnectionError}
        calls.clear()
        fresh = Resources()
        assert (await outcome_of(work, resources=fresh, options=rules)).state == State.FAILED

    @pytest.mark.parametrize("scope", ["scheduler", "job"])
    @pytest.mark.parametrize(
        "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
    )
    async def test_whatever_it_raises(
        self, resources: Resources, error: BaseException, scope: Any
    ) -> None:
        def bad() -> str:
            raise error

        def work(value: str = inject(bad, scope=scope)) -> str:
            return value

        outcome = await outcome_of(work, resources=resources)
        assert outcome.ending == Ending.FAILED
        assert type(error).__name__ in (outcome.error or "")

    async def test_of_the_handler_goes_through_what_was_opened_for_the_job(
        self, log: Log, resources: Resources
    ) -> None:
        async def work(
            own: str = log.opening("own", "job"), shared: str = log.opening("shared")
        ) -> None:
            raise ValueError(own + shared)

        outcome = await outcome_of(work, resources=resources)
        assert "ValueError: ownshared" in (outcome.error or "")
        assert log == ["open own", "open shared", "own sees ValueError", "close own"]

    async def test_that_a_resource_swallows_is_an_error_all_the_same(
        self, resources: Resources
    ) -> None:
        async def swallows() -> AsyncIterator[None]:
            with contextlib.suppress(ValueError):
                yield

        async def work(_own: None = inject(swallows, scope="job")) -> None:
            raise ValueError("broken")

        outcome = await outcome_of(work, resources=resources)
        assert (outcome.ending, outcome.result) == (Ending.FAILED, None)
        assert "ValueError: broken" in (outcome.error or "")

    async def test_in_closing_what_is_the_jobs_is_the_jobs(self, resources: Resources) -> None:
        """A session that cannot commit, for example."""

        async def uncommitted() -> AsyncIterator[None]:
            yield
            raise OSError("the commit failed")

        async def work(_own: None = inject(uncommitted, scope="job")) -> str:
            return "done"

        outcome = await outcome_of(work, resources=resources)
        assert (outcome.ending, outcome.result) == (Ending.FAILED, None)
        assert "the commit failed" in (outcome.error or "")

    async def test_in_closing_what_is_everybodys_are_logged(
        self, log: Log, resources: Resources, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def bad() -> AsyncIterator[None]:
            yield
            raise OSError("will not close")

        async def work(one: str = log.opening("good"), two: None = inject(bad)) -> None: ...

        await outcome_of(work, resources=resources)
        await resources.aclose()
        assert "will not close" in caplog.text
        assert log == ["open good", "close good"]

    async def test_one_that_does_not_close_is_cancelled(
        self, log: Log, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("asyncjobq.injection.CLOSING", 0.02)
        before, resources = asyncio.all_tasks(), Resources()

        async def hangs() -> AsyncIterator[None]:
            yield
            await asyncio.sleep(60)

        async def work(one: str = log.opening("good"), two: None = inject(hangs)) -> None: ...

        await outcome_of(work, resources=resources)
        async with asyncio.timeout(5):
            await resources.aclose()
        assert "did not close within" in caplog.text
        assert log == ["open good", "close good"]
        assert asyncio.all_tasks() == before

    async def test_one_that_never_opens_is_cancelled_at_the_end(self) -> None:
        before, resources = asyncio.all_tasks(), Resources()

        async def never() -> None:
            await asyncio.sleep(60)

        async def work(value: None = inject(never)) -> None: ...

        assert (await outcome_of(work, resources=resources, timeout=0.02)).ending == (
            Ending.TIMED_OUT
        )
        async with asyncio.timeout(5):
            await resources.aclose()
        assert asyncio.all_tasks() == before
        late = await outcome_of(work, resources=resources)
        assert "serving ends" in (late.error or "")

    async def test_a_stopped_job_closes_its_own(self, log: Log, resources: Resources) -> None:
        async def work(_own: str = log.opening("own", "job")) -> None:
            await asyncio.sleep(60)

        run = run_of(work, resources=resources)
        outcome = asyncio.ensure_future(ended(run))
        await asyncio.sleep(0.01)
        run.stop(Stop.INTERRUPTED)
        assert (await outcome).ending == Ending.INTERRUPTED
        assert log == ["open own", "own sees CancelledError", "close own"]

    async def test_what_a_thread_uses_is_not_closed_under_it(
        self, log: Log, resources: Resources
    ) -> None:
        started, go_on = threading.Event(), threading.Event()

        def work(_own: str = log.opening("own", "job")) -> None:
            started.set()
            go_on.wait(10)
            log.append("work ends")

        run = run_of(work, resources=resources)
        outcome = asyncio.ensure_future(ended(run))
        assert await asyncio.to_thread(started.wait, 10)
        run.stop(Stop.TIMED_OUT)
        assert (await outcome).ending == Ending.TIMED_OUT
        assert log == ["open own"]
        go_on.set()
        async with asyncio.timeout(5):
            while len(log) < 3:
                await asyncio.sleep(0.001)
        assert log == ["open own", "work ends", "close own"]


async def _needs_context(ctx: JobContext) -> int:
    return ctx.job_id


def _per_job() -> str:
    return "x"


def _needs_per_job(value: str = inject(_per_job, scope="job")) -> str:
    return value


def _needs_argument(url: str) -> str:
    return url


def _by_position(value: str = inject(_per_job), /) -> str:
    return value


def _itself() -> str:
    return ""


def _takes_itself(value: str = inject(_itself)) -> str:
    return value


# What only mutation can make.
_back: Any = inspect.Parameter(
    "value", inspect.Parameter.KEYWORD_ONLY, default=inject(_takes_itself)
)
vars(_itself)["__signature__"] = inspect.Signature([_back])


class TestRegistration:
    @pytest.mark.parametrize(
        ("default", "message"),
        [
            (inject(_needs_context), "'ctx' is there for one job only"),
            (inject(_needs_per_job), "'value' is there for one job only"),
            (inject(_needs_argument, scope="job"), "'url' has no default"),
            (inject(_by_position), "'value' cannot be passed by name"),
            (inject(_takes_itself), "need each other: _takes_itself → _itself → _takes_itself"),
        ],
    )
    def test_refuses_what_cannot_be_provided(self, default: Any, message: str) -> None:
        def work(path: str, value: Any = default) -> None: ...

        handlers = Handlers()
        with pytest.raises(HandlerError, match=message):
            handlers.handler(work)
        assert handlers.types == ()

    @pytest.mark.parametrize("provider", [None, "get", 3, [], _generator()])
    def test_refuses_what_provides_nothing(self, provider: Any) -> None:
        with pytest.raises(HandlerError, match="pass the function itself"):
            inject(provider)

    def test_refuses_unknown_scopes(self) -> None:
        with pytest.raises(HandlerError, match='scope is "scheduler" or "job"'):
            inject(_per_job, scope="request")  # type: ignore[call-overload]


class TestJobs:
    def test_do_not_take_them(self) -> None:
        handlers = Handlers()

        @handlers.handler
        async def fetch(url: str, http: str = inject(_per_job), *, retries: int = 0) -> str:
            return f"{url} {http} {retries}"

        assert fetch.job("a").args == {"url": "a"}
        assert fetch.job("a", retries=2).args == {"url": "a", "retries": 2}
        for call in (lambda: fetch.job("a", http="x"), lambda: fetch.encode({"http": "x"})):
            with pytest.raises(ArgumentsError, match="'http' is filled in by the worker"):
                call()
        with pytest.raises(ArgumentsError):
            fetch.job("a", "x", "y")  # type: ignore[call-overload]

    async def test_the_function_itself_takes_what_tests_give_it(self) -> None:
        @Handlers().handler
        async def fetch(url: str, http: str = inject(_per_job)) -> str:
            return f"{url} {http}"

        assert await fetch("a", http="fake") == "a fake"
        assert await fetch("a", "fake") == "a fake"


@pytest.mark.asyncio(loop_scope="module")
class TestServing:
    async def test_opens_at_first_use_and_closes_at_the_end(self, jobs: Jobs, log: Log) -> None:
        @jobs.scheduler.handler
        async def work(shared: str = log.opening("shared")) -> str:
            return shared

        async with serving(jobs.scheduler):
            assert log == []
            made = [await jobs.scheduler.enqueue(work.job()) for _ in range(3)]
            for job in made:
                assert await jobs.scheduler.wait(job) == "shared"
            assert log == ["open shared"]
        assert log == ["open shared", "close shared"]
        job = await jobs.scheduler.enqueue(work.job())
        await jobs.scheduler.drain()
        assert log == ["open shared", "close shared"] * 2
        with pytest.raises(ArgumentsError, match="filled in by the worker"):
            await jobs.scheduler.enqueue("work", {"shared": "mine"})

    async def test_a_job_whose_resource_is_away_is_retried(self, jobs: Jobs) -> None:
        def flaky(ctx: JobContext) -> str:
            if ctx.attempt < 3:
                raise ConnectionError("not yet")
            return "there"

        @jobs.scheduler.handler(retry=constant(0), retry_on=ConnectionError)
        def work(value: str = inject(flaky, scope="job")) -> str:
            return value

        job = await jobs.scheduler.enqueue(work.job())
        await jobs.scheduler.drain()
        row = await jobs.row(job)
        assert (row.state, row.attempt, row.result) == ("done", 3, "there")

"""The public surface: names and signatures that programs rely on, pinned."""

from __future__ import annotations

import inspect
from typing import Any

import asyncjobq
from asyncjobq import Handler, Handlers, Job, JobContext, JobOptions, JobSpec, Scheduler
from asyncjobq.errors import AsyncJobQError

NAMES = [
    "ArgumentsError",
    "AsyncJobQError",
    "Attempt",
    "Budget",
    "Cancel",
    "Cancelled",
    "Capacity",
    "CatchUp",
    "CheckReport",
    "CommitUnknownError",
    "Concurrency",
    "ConfigurationError",
    "Container",
    "CycleError",
    "DatabaseUnavailableError",
    "Edge",
    "Ending",
    "Explanation",
    "Fail",
    "Finding",
    "Graph",
    "Handler",
    "HandlerError",
    "HandlerProcessError",
    "Handlers",
    "InvalidJobError",
    "Job",
    "JobCancelled",
    "JobContext",
    "JobDepRow",
    "JobEndedError",
    "JobFailed",
    "JobNotFoundError",
    "JobOptions",
    "JobRow",
    "JobSpec",
    "Kind",
    "KindStats",
    "LeaseLostError",
    "Limit",
    "LimitState",
    "Mended",
    "Neighbourhood",
    "Node",
    "ParentError",
    "Pause",
    "RateLimit",
    "Reason",
    "RepairReport",
    "ResultError",
    "Retry",
    "RetryPolicy",
    "Schedule",
    "ScheduleNotFoundError",
    "Scheduler",
    "SchedulerStateError",
    "SchemaError",
    "Snooze",
    "StaleSnapshotError",
    "State",
    "Stats",
    "StoredResultError",
    "UniqueConflictError",
    "UnknownUpstreamError",
    "UnsupportedDatabaseError",
    "Upstream",
    "Why",
    "WorkerState",
    "Workflow",
    "after",
    "constant",
    "enqueue",
    "exponential",
    "inject",
    "metadata",
    "none",
]

SCHEDULER = {
    "__init__": (
        "(self, database: 'str | URL | AsyncEngine', *, handlers: 'Iterable[Handlers]' = (), "
        "concurrency: 'int' = 10, queues: 'Iterable[str] | Mapping[str, int]' = ('default',), "
        "limits: 'Iterable[Limit]' = (), "
        "lease_ttl: 'Duration' = 30.0, poll_interval: 'Duration' = 1.0, "
        "stop_timeout: 'Duration' = 20.0, default_timeout: 'Duration | None' = 3600.0, "
        "max_result_bytes: 'int' = 8000000, "
        "retention: 'Mapping[str, Duration] | None' = None, listen_url: 'str | URL | None' = None, "
        "worker_id: 'str | None' = None, schema: 'str | None' = None, "
        "table_prefix: 'str' = '') -> 'None'"
    ),
    "add_schedule": (
        "(self, name: 'str', job: 'JobSpec[Any] | str', args: 'Mapping[str, Any] | None' = None, "
        "/, *, cron: 'str | None' = None, every: 'float | timedelta | None' = None, "
        "timezone: 'str | ZoneInfo | None' = None, "
        "catch_up: 'CatchUp | str' = <CatchUp.LATEST: 'latest'>, overlap: 'bool' = True, "
        "session: 'AsyncCaller | None' = None, **options: 'Unpack[RecurringArgs]') -> 'Schedule'"
    ),
    "aclose": "(self) -> 'None'",
    "around": "(self, function: 'M', /) -> 'M'",
    "attempts": (
        "(self, job: 'JobRef', /, *, limit: 'int' = 1000, session: 'AsyncCaller | None' = None) "
        "-> 'list[Attempt]'"
    ),
    "as_completed": (
        "(self, jobs: 'Iterable[JobRef]', /, *, timeout: 'Duration | None' = None) "
        "-> 'AsyncIterator[Job[Any]]'"
    ),
    "cancel": "(self, job: 'JobRef', /, *, session: 'AsyncCaller | None' = None) -> 'Cancelled'",
    "cancel_many": (
        "(self, *, state: 'States | None' = None, type: 'str | None' = None, "
        "queue: 'str | None' = None, group_key: 'str | None' = None, "
        "session: 'AsyncCaller | None' = None) -> 'dict[Cancelled, int]'"
    ),
    "check": (
        "(self, *, examples: 'int' = 10, grace: 'Duration' = 60.0, "
        "timeout: 'Duration' = 300.0) -> 'CheckReport'"
    ),
    "check_database": "(self) -> 'None'",
    "create_schema": "(self) -> 'None'",
    "drain": "(self, *, scheduled: 'bool' = False) -> 'dict[State, int]'",
    "enqueue": (
        "(self, job: 'JobSpec[Any] | str', args: 'Mapping[str, Any] | None' = None, /, *, "
        "session: 'AsyncCaller | None' = None, **options: 'Unpack[JobOptionArgs]') -> 'Job[Any]'"
    ),
    "enqueue_many": (
        "(self, jobs: 'Iterable[JobSpec[R]]', /, *, session: 'AsyncCaller | None' = None) "
        "-> 'list[Job[R]]'"
    ),
    "enqueue_sync": (
        "(self, session: 'SyncCaller', job: 'JobSpec[Any] | str', "
        "args: 'Mapping[str, Any] | None' = None, /, **options: 'Unpack[JobOptionArgs]') "
        "-> 'Job[Any]'"
    ),
    "explain": (
        "(self, job: 'JobRef', /, *, session: 'AsyncCaller | None' = None) -> 'Explanation'"
    ),
    "find": (
        "(self, *, state: 'States | None' = None, type: 'str | None' = None, "
        "queue: 'str | None' = None, group_key: 'str | None' = None, "
        "parent: 'JobRef | None' = None, limit: 'int' = 100, after: 'int' = 0, "
        "newest: 'bool' = False, "
        "session: 'AsyncCaller | None' = None) -> 'list[Job[Any]]'"
    ),
    "get": "(self, job: 'JobRef', /, *, session: 'AsyncCaller | None' = None) -> 'Job[Any]'",
    "graph": (
        "(self, job: 'JobRef', /, *, limit: 'int' = 20000, session: 'AsyncCaller | None' = None) "
        "-> 'Graph'"
    ),
    "meta_from": "(self, function: 'S', /) -> 'S'",
    "neighbours": (
        "(self, job: 'JobRef', /, *, limit: 'int' = 20, session: 'AsyncCaller | None' = None) "
        "-> 'Neighbourhood'"
    ),
    "on": "(self, *kinds: 'type[Event]') -> 'Callable[[F], F]'",
    "pause": (
        "(self, *, queue: 'str | None' = None, type: 'str | None' = None, "
        "session: 'AsyncCaller | None' = None) -> 'None'"
    ),
    "pause_schedule": ("(self, name: 'str', /, *, session: 'AsyncCaller | None' = None) -> 'None'"),
    "paused": "(self, *, session: 'AsyncCaller | None' = None) -> 'list[Pause]'",
    "progress": (
        "(self, job: 'JobRef', /, *, session: 'AsyncCaller | None' = None) -> 'dict[State, int]'"
    ),
    "prune": (
        "(self, *, older_than: 'Duration', states: 'States' = ('done', "
        "'failed', 'cancelled'), limit: 'int | None' = None, "
        "session: 'AsyncCaller | None' = None) -> 'int'"
    ),
    "remove_schedule": (
        "(self, name: 'str', /, *, session: 'AsyncCaller | None' = None) -> 'None'"
    ),
    "repair": (
        "(self, *, examples: 'int' = 10, grace: 'Duration' = 60.0, "
        "timeout: 'Duration' = 300.0) -> 'RepairReport'"
    ),
    "resume": (
        "(self, *, queue: 'str | None' = None, type: 'str | None' = None, "
        "session: 'AsyncCaller | None' = None) -> 'bool'"
    ),
    "resume_schedule": (
        "(self, name: 'str', /, *, session: 'AsyncCaller | None' = None) -> 'None'"
    ),
    "retry": "(self, job: 'JobRef', /, *, session: 'AsyncCaller | None' = None) -> 'None'",
    "retry_many": (
        "(self, *, state: 'States' = 'failed', type: 'str | None' = None, "
        "queue: 'str | None' = None, group_key: 'str | None' = None, "
        "session: 'AsyncCaller | None' = None) -> 'int'"
    ),
    "clear_limit": "(self, name: 'str', /, *, session: 'AsyncCaller | None' = None) -> 'None'",
    "limits": (
        "(self, job: 'JobRef | None' = None, /, *, most: 'int' = 10000, "
        "session: 'AsyncCaller | None' = None) -> 'list[LimitState]'"
    ),
    "set_limit": (
        "(self, name: 'str', amount: 'float', /, *, per: 'float | timedelta | None' = None, "
        "burst: 'int | None' = None, session: 'AsyncCaller | None' = None) -> 'None'"
    ),
    "set_weight": (
        "(self, group_key: 'str', weight: 'float | None', /, *, "
        "session: 'AsyncCaller | None' = None) -> 'None'"
    ),
    "run": "(self) -> 'None'",
    "schedules": "(self, *, session: 'AsyncCaller | None' = None) -> 'list[Schedule]'",
    "serve": "(self) -> 'None'",
    "serve_until_signalled": "(self) -> 'None'",
    "serving": "(self) -> 'AsyncIterator[Self]'",
    "stats": ("(self, *, most: 'int' = 10000, session: 'AsyncCaller | None' = None) -> 'Stats'"),
    "stop": "(self, *, now: 'bool' = False) -> 'None'",
    "subscribe": (
        "(self, function: 'Callable[[Any], object]', /, *kinds: 'type[Event]') "
        "-> 'Callable[[], None]'"
    ),
    "wait": "(self, job: 'JobRef', /, *, timeout: 'Duration | None' = None) -> 'Any'",
    "workers": "(self, *, session: 'AsyncCaller | None' = None) -> 'list[WorkerState]'",
    "workflow": (
        "(self, name: 'str', /, *, session: 'AsyncCaller | None' = None, "
        "fail_fast: 'bool' = False, **options: 'Unpack[JobOptionArgs]') "
        "-> 'AsyncIterator[Workflow]'"
    ),
}

TESTER = {
    "__init__": (
        "(self, app: 'App' = (), database: 'str | URL | AsyncEngine | None' = None, /) -> 'None'"
    ),
    "assert_enqueued": (
        "(self, job: 'str | AnyHandler', /, args: 'Mapping[str, Any] | None' = None, *, "
        "within: 'Duration' = 0, count: 'int | None' = None, session: 'AsyncCaller | None' = None, "
        "**others: 'Any') -> 'Job[Any]'"
    ),
    "assert_not_enqueued": (
        "(self, job: 'str | AnyHandler', /, args: 'Mapping[str, Any] | None' = None, *, "
        "session: 'AsyncCaller | None' = None, **others: 'Any') -> 'None'"
    ),
    "context": (
        "(self, job: 'JobSpec[Any] | AnyHandler | str' = 'test', "
        "args: 'Mapping[str, Any] | None' = None, /, *, attempt: 'int' = 1, "
        "checkpointed: 'Any' = None, **options: 'Any') -> 'JobContext'"
    ),
    "drain": ("(self, *, scheduled: 'bool' = False, raising: 'bool' = True) -> 'dict[State, int]'"),
    "inline": "(self) -> 'None'",
    "run_one": (
        "(self, job: 'str | AnyHandler | None' = None, /, *, raising: 'bool' = True) -> 'Job[Any]'"
    ),
}
FIXTURES = {
    "assert_enqueued", "assert_not_enqueued", "drain", "inline_jobs", "job_app", "job_clock",
    "job_context", "job_database", "job_scheduler", "job_tester", "run_one",
}  # fmt: skip
CONTEXT = {"set_cost",
    "add_child", "await_", "checkpoint", "checkpoint_sync", "complete", "complete_sync",
    "enqueue", "progress", "session", "upstreams",
}  # fmt: skip
CONTEXT_VALUES = {
    "args",
    "attempt",
    "cancel_requested",
    "checkpointed",
    "deadline",
    "group_key",
    "job_id",
    "max_attempts",
    "meta",
    "queue",
    "type",
}
OPTIONS = (
    "queue name group_key weight priority run_after timeout max_attempts "
    "parent depends_on cost meta unique_key unique_while unique_for on_conflict"
)


def signatures_of(kind: type) -> dict[str, str]:
    return {
        name: str(inspect.signature(member))
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if name == "__init__" or not name.startswith("_")
    }


def test_the_names() -> None:
    assert sorted(asyncjobq.__all__) == sorted(NAMES)
    exported = {name for name in dir(asyncjobq) if not name.startswith("_")}
    modules = {name for name in exported if inspect.ismodule(getattr(asyncjobq, name))}
    assert exported - modules == set(NAMES)


def test_the_methods_of_a_scheduler() -> None:
    assert signatures_of(Scheduler) == SCHEDULER


def test_everything_public_is_documented() -> None:
    for name in NAMES:
        member: Any = getattr(asyncjobq, name)
        if inspect.isclass(member) or inspect.isfunction(member):
            assert member.__doc__, name
    for kind in (Scheduler, Handlers, Handler, JobContext, JobSpec):
        for name in signatures_of(kind):
            if not name.startswith("_"):
                assert getattr(kind, name).__doc__, f"{kind.__name__}.{name}"


def test_the_registry() -> None:
    assert {name for name in dir(Handlers) if not name.startswith("_")} == {
        "around", "cron", "declare", "definitions", "every", "find", "handler", "include", "types",
    }  # fmt: skip
    assert {"cron", "every", "handler"} <= vars(Scheduler("sqlite+aiosqlite:///unused.db")).keys()
    public = {name for name in vars(Handler) if not name.startswith("_")}
    assert {"job", "encode", "decode", "result_of"} <= public


def test_the_context() -> None:
    assert set(signatures_of(JobContext)) - {"__init__"} == CONTEXT
    assert {*JobContext.__dataclass_fields__, *vars(JobContext)} >= CONTEXT_VALUES


def test_the_fixtures_for_tests() -> None:
    import _asyncjobq_pytest as plugin
    from asyncjobq import testing

    assert testing.__all__ == ["JobClock", "JobTester"]
    told = {"committed", "failed", "raised"}  # by the schedulers under test
    tester = signatures_of(testing.JobTester)
    assert {name: tester[name] for name in tester if name not in told} == TESTER
    assert set(signatures_of(testing.JobClock)) == {"__init__", "move", "move_to", "now", "reset"}
    fixtures = {name for name, value in vars(plugin).items() if "Fixture" in type(value).__name__}
    assert fixtures == FIXTURES


def test_the_options_of_a_job() -> None:
    assert list(JobOptions.__dataclass_fields__) == OPTIONS.split()
    assert set(asyncjobq.options.JobOptionArgs.__annotations__) == set(OPTIONS.split())


def test_a_job_is_frozen_plain_and_pickles() -> None:
    import pickle

    job: Job[Any] = Job(
        id=1,
        queue="default",
        type="work",
        kind=asyncjobq.Kind.JOB,
        state=asyncjobq.State.DONE,
        args={"a": 1},
    )
    assert job.ended
    assert pickle.loads(pickle.dumps(job)) == job  # noqa: S301


def test_errors_have_one_root() -> None:
    control_flow = {"Retry", "Snooze", "Fail", "Cancel"}
    for name in NAMES:
        member = getattr(asyncjobq, name)
        if inspect.isclass(member) and issubclass(member, BaseException):
            assert issubclass(member, AsyncJobQError) == (name not in control_flow), name


def test_it_is_typed_and_has_a_version() -> None:
    from importlib.resources import files

    assert files("asyncjobq").joinpath("py.typed").is_file()
    assert asyncjobq.__version__.count(".") == 2

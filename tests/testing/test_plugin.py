"""A user's own suite with the fixtures, run by pytest in a process of its own, in each plugin."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PLUGIN = "_asyncjobq_pytest"
STRICT = ("-p", "pytest_asyncio.plugin", "-o", "asyncio_default_fixture_loop_scope=function")
RUNNERS = {
    "pytest-asyncio": ([*STRICT, "-o", "asyncio_mode=auto"], ""),
    "pytest-asyncio, strict": (STRICT, "import pytest\n"),
    "pytest-asyncio, one loop": (
        [*STRICT, "-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=module"],
        "",
    ),
    "anyio": (["-p", "anyio.pytest_plugin"], "import pytest\npytestmark = pytest.mark.anyio\n"),
    "anyio beside pytest-asyncio": (
        [*STRICT, "-p", "anyio.pytest_plugin"],
        "import pytest\npytestmark = pytest.mark.anyio\n",
    ),
}
ASYNCIO_ONLY = "\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"

SHOP = """
from asyncjobq import JobContext, Scheduler

scheduler = Scheduler("postgresql+asyncpg://nobody@127.0.0.1:9/production")

@scheduler.handler
async def write_invoice(ctx: JobContext, product: str) -> str:
    if product == "broken":
        raise ValueError("no price")
    return f"{product}, attempt {ctx.attempt}"

async def place_order(product: str):
    return await scheduler.enqueue(write_invoice.job(product), run_after=5 * (product == "later"))
"""
CONFTEST = """
import pytest, shop

@pytest.fixture
def job_app():
    return shop.scheduler
"""
SUITE = """
import shop

async def test_three_lines(assert_enqueued, drain):
    await shop.place_order("tea")
    await assert_enqueued("write_invoice", args={"product": "tea"})
    assert (await drain())["done"] == 1

async def test_the_tables_are_empty_again(job_scheduler, job_database):
    assert job_scheduler is shop.scheduler
    assert await job_scheduler.find() == []

async def test_the_others(run_one, assert_not_enqueued, job_clock, job_context):
    await assert_not_enqueued("write_invoice")
    await shop.place_order("later")
    job_clock.move(5)
    assert (await run_one()).result == "later, attempt 1"
    assert await shop.write_invoice(await job_context(attempt=4), "tea") == "tea, attempt 4"

async def test_inline(inline_jobs):
    job = await shop.place_order("tea")
    assert job.result == "tea, attempt 1"

def test_without_a_loop(drain):
    import asyncio
    asyncio.run(shop.place_order("tea"))
    assert asyncio.run(drain())["done"] == 1

def test_no_thread_is_left():
    import threading
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "asyncjobq" in name], names
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Give a user's project: an application, and a conftest.py that names its scheduler."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{pytester.path}")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(shop=SHOP)
    return pytester


def run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run the user's suite, in which a warning is an error."""
    return suite.runpytest_subprocess("-p", PLUGIN, "-p", "no:cacheprovider", "-Werror", *options)


@pytest.mark.parametrize("runner", RUNNERS)
def test_in_each_plugin(suite: pytest.Pytester, runner: str) -> None:
    options, mark = RUNNERS[runner]
    suite.makeconftest(CONFTEST + (ASYNCIO_ONLY if "anyio" in runner else ""))
    tests = SUITE
    if "strict" in runner:
        tests = tests.replace("async def", "@pytest.mark.asyncio\nasync def")
    suite.makepyfile(test_shop=mark + tests)
    run(suite, *options).assert_outcomes(passed=6)


def test_what_a_failure_says(suite: pytest.Pytester) -> None:
    suite.makeconftest(CONFTEST)
    suite.makepyfile(
        test_shop="""
        import shop

        async def test_other_arguments(assert_enqueued):
            await shop.place_order("tea")
            await assert_enqueued("write_invoice", args={"product": "cup"})

        async def test_misspelt(assert_enqueued):
            await assert_enqueued("write_invoices")

        async def test_error_of_a_handler(drain):
            await shop.place_order("broken")
            await drain()
        """
    )
    result = run(suite, *RUNNERS["pytest-asyncio"][0])
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: No job 'write_invoice' with args={'product': 'cup'} was enqueued.",
            "*Of that type there are:",
            "*job 1 (write_invoice, ready, queue 'default') {'product': 'tea'}: product is 'tea'",
            "*AssertionError: No job 'write_invoices' was enqueued.",
            "*There are no jobs at all.",
            "*Did you mean 'write_invoice'?",
            '*raise ValueError("no price")',
            "*ValueError: no price",
            "*Raised by the handler of job 1 (write_invoice), attempt 1.",
        ]
    )


def test_on_the_users_database(suite: pytest.Pytester, database_url: str) -> None:
    database = f"\n@pytest.fixture\ndef job_database():\n    return {database_url!r}\n"
    suite.makeconftest(CONFTEST + database)
    suite.makepyfile(test_shop=SUITE)
    run(suite, *RUNNERS["pytest-asyncio"][0]).assert_outcomes(passed=6)


def test_an_error_at_a_commit_shows_at_the_end(suite: pytest.Pytester) -> None:
    suite.makeconftest(CONFTEST)
    suite.makepyfile(
        test_shop="""
        import shop

        async def test_commits(inline_jobs):
            async with inline_jobs.scheduler.database.session() as session, session.begin():
                job = shop.write_invoice.job("broken")
                await shop.scheduler.enqueue(job, session=session)
        """
    )
    result = run(suite, *RUNNERS["pytest-asyncio"][0])
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ValueError: no price"])


def test_async_fixtures_and_fixtures_of_the_same_names(suite: pytest.Pytester) -> None:
    serving = """
@pytest_asyncio.fixture
async def web(job_scheduler):
    async with job_scheduler, job_scheduler.serving():
        yield

@pytest.fixture
def drain():
    return "theirs"
"""
    suite.makeconftest("import pytest_asyncio" + CONFTEST + serving)
    suite.makepyfile(
        test_shop="""
        import shop

        async def test_them(web, drain, run_one):
            await shop.place_order("tea")
            assert drain == "theirs"
            assert (await run_one()).state == "done"
        """
    )
    run(suite, *RUNNERS["pytest-asyncio"][0]).assert_outcomes(passed=1)


def test_installed_and_not_used(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_else="""
        import sys

        def test_else():
            assert "asyncjobq" not in sys.modules
            assert "sqlalchemy" not in sys.modules
        """
    )
    run(suite).assert_outcomes(passed=1)


def test_the_fixtures_are_documented(suite: pytest.Pytester) -> None:
    shown = run(suite, "--fixtures").stdout.str()
    for name in ("job_app", "job_database", "drain", "run_one", "assert_enqueued", "inline_jobs"):
        assert f"\n{name} -- " in shown
    assert "no docstring available" not in shown


def test_the_plugin_is_what_pytest_finds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"asyncjobq": PLUGIN}
    assert importlib.import_module(PLUGIN).__name__ == PLUGIN
    built = project["tool"]["hatch"]["build"]["targets"]
    assert f"{PLUGIN}.py" in built["wheel"]["force-include"]
    assert f"{PLUGIN}.py" in built["sdist"]["include"]


def test_without_pytest_it_says_what_to_install() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules['pytest'] = None\n"
        "import asyncjobq.testing\n"
        f"import {PLUGIN}"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 1
    assert "pip install 'asyncjobq[testing]'" in ran.stderr

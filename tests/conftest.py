"""Databases for the tests: `backend_name`, `database_url`, `make_database`, `databases`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from backend_report import CAPABILITY_SKIP, BackendReport, backends_of, note_backend
from capabilities import missing_capability
from databases import Databases
from servers import BACKENDS, Servers
from throwaway import MissingServerError

DEVELOPMENT_MODE = "PYTHONDEVMODE"
SLOW_STEP = "Executing %s took %.3f seconds"
SERVERS = pytest.StashKey[Servers]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "requires(*capabilities): skip on databases that lack one of these"
    )
    servers = Servers(os.environ)
    config.stash[SERVERS] = servers
    config.pluginmanager.register(BackendReport(servers), "asyncjobq-backend-report")
    config.add_cleanup(servers.close)
    # What asyncio says in development mode of a step that took long says how busy the machine is.
    logging.getLogger("asyncio").addFilter(lambda record: record.msg != SLOW_STEP)
    if hasattr(config, "workerinput"):
        os.environ.pop(DEVELOPMENT_MODE, None)  # it is not for the programs that tests start


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Hand `-X dev` on to the processes of pytest-xdist, which are started without it."""
    if sys.flags.dev_mode:
        os.environ[DEVELOPMENT_MODE] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fail at once if a backend that was asked for is not there."""
    if session.config.option.collectonly:
        return
    if problems := list(session.config.stash[SERVERS].problems()):
        session.shouldfail = "; ".join(problems)
        raise session.Failed(session.shouldfail)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what a backend cannot do, before its server is started for it."""
    required = [name for mark in item.iter_markers("requires") for name in mark.args]
    for backend in backends_of(item):
        if reason := missing_capability(backend, required):
            item.stash[CAPABILITY_SKIP] = True
            pytest.skip(f"{backend} {reason}")


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Servers:
    """Return the servers of this session."""
    return request.config.stash[SERVERS]


@pytest.fixture(scope="session")
def databases(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    """Give what makes databases; its `prepared` serves tests that all want the same tables."""
    made = Databases(servers, tmp_path_factory.mktemp("databases"))
    yield made
    made.close()


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest, servers: Servers) -> str:
    """Run the test once on each backend; skip those that are not on this machine."""
    name: str = request.param
    try:
        servers.get(name)
    except MissingServerError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture
def database_url(backend_name: str, databases: Databases) -> Iterator[str]:
    """Give the URL of a fresh, empty database on the test's backend."""
    with databases.fresh(backend_name) as url:
        yield url


@pytest.fixture
def make_database(
    request: pytest.FixtureRequest, databases: Databases
) -> Iterator[Callable[[str], str]]:
    """Give a function that makes a fresh database on a named backend and returns its URL."""
    with ExitStack() as stack:

        def make(backend: str) -> str:
            note_backend(request.node, backend)
            try:
                return stack.enter_context(databases.fresh(backend))
            except MissingServerError as error:
                pytest.skip(str(error))

        yield make

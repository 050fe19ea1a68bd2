"""Any graph, whatever happens to it, is what a plain model says, and ends.

The long run: `ASYNCJOBQ_PROPERTY_EXAMPLES=2000 pytest tests/graphs/test_property.py`. A failure
prints the seed that finds it again, and the shortest list of operations that shows it, which
`replay` takes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, StaticPool, create_engine, event, make_url

from asyncjobq.backends import backend_for
from asyncjobq.migrations import create_schema
from asyncjobq.models import tables_for
from conformance.kit import SYNC_DRIVERS
from graphs.operations import (
    OUTCOMES,
    AddChild,
    Cancel,
    Claim,
    Enqueue,
    EnqueueAfterUnknown,
    Finish,
    Operation,
    PassTime,
    Plan,
    Renew,
    Retry,
    RetryWhatIsNotOver,
    Run,
    SettleAll,
    SettleOnce,
    WriteWorkflow,
)
from graphs.world import World

EXAMPLES: Final = os.environ.get("ASYNCJOBQ_PROPERTY_EXAMPLES")
SEED: Final = int(os.environ.get("ASYNCJOBQ_PROPERTY_SEED") or random.randrange(10**9))

numbers = st.integers(0, 30)
rules = st.sampled_from(["cancel", "cancel", "run"])
edges = st.lists(st.tuples(numbers, rules), max_size=3).map(tuple)
seldom = st.integers(0, 4).map(lambda number: number == 4)
sometimes = st.booleans()
plans = st.builds(
    Plan,
    edges=edges,
    inside=numbers,
    container=st.integers(0, 2).map(lambda number: number == 2),
    fail_fast=sometimes,
    delayed=seldom,
    once=sometimes,
)
workflows = st.builds(
    WriteWorkflow,
    plans=st.lists(plans, min_size=4, max_size=10).map(tuple),
    below=st.none() | numbers,
)
limits = st.sampled_from([1, 2, 200])
followers = st.sampled_from([1, 2, 2000])
claims = st.builds(Claim, count=st.integers(1, 3), short=sometimes)
hows = st.sampled_from(["done", "done", "failed", *OUTCOMES])
finishes = st.builds(Finish, which=numbers, how=hows)
settlings = st.builds(
    SettleOnce,
    limit=limits,
    followers=followers,
    after=st.just(0) | numbers,
    crash_after=st.none() | st.integers(0, 25),
)
operations: st.SearchStrategy[Operation] = st.one_of(
    workflows,
    st.builds(Enqueue, plans=st.lists(plans, min_size=1, max_size=3).map(tuple)),
    st.builds(AddChild, to=numbers, plan=plans),
    claims,
    claims,
    finishes,
    finishes,
    st.builds(Run, count=st.integers(1, 5), how=hows),
    st.builds(Run, count=st.integers(1, 5), how=hows),
    st.builds(Cancel, which=numbers),
    st.builds(Retry, which=numbers),
    st.builds(Retry, which=numbers),
    st.builds(PassTime),
    settlings,
    settlings,
    st.builds(SettleAll, limit=limits, followers=followers),
    st.builds(SettleAll, limit=limits, followers=followers),
    st.sampled_from([Renew(), EnqueueAfterUnknown(), RetryWhatIsNotOver(0)]),
)
histories = st.lists(operations, min_size=14, max_size=20)


@pytest.fixture
def world(backend_name: str, database_url: str) -> Iterator[World]:
    """Give empty tables and an empty model."""
    engine = _engine(backend_name, database_url)
    with engine.begin() as connection:
        create_schema(connection)
    shared = backend_for(engine.dialect, tables_for())
    yield World(engine, type(shared)(shared.tables))
    engine.dispose()


def _engine(backend_name: str, url: str) -> Engine:
    if backend_name != "sqlite":
        plain = make_url(url).set(drivername=SYNC_DRIVERS[backend_name])
        return create_engine(plain, isolation_level="READ COMMITTED", poolclass=StaticPool)
    engine = create_engine("sqlite://")

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA foreign_keys=ON").close()

    return engine


def replay(world: World, first: Operation, history: Sequence[Operation]) -> None:
    """Take the operations one after the other, and then see that everything ends."""
    world.clear()
    for operation in (first, *history):
        operation.take(world)
    world.run_to_the_end()


def test_any_graph_is_what_the_model_says_and_ends(world: World, backend_name: str) -> None:
    examples = int(EXAMPLES or (300 if backend_name == "sqlite" else 50))

    @seed(SEED)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=[Phase.generate] if os.environ.get("NOSHRINK") else list(Phase),
    )
    @given(first=workflows, history=histories)
    def any_graph(first: Operation, history: Sequence[Operation]) -> None:
        replay(world, first, history)

    try:
        any_graph()
    except BaseException as error:
        error.add_note(
            f"Again: ASYNCJOBQ_PROPERTY_SEED={SEED} ASYNCJOBQ_PROPERTY_EXAMPLES={examples} "
            f"pytest tests/graphs/test_property.py -k {backend_name}"
        )
        raise

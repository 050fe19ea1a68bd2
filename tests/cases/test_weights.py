"""Groups share the slots of whole workers by weight; a flood of one hides no other.

At full length, the numbers of jobs are those that the promise is made for: a tenth off at most.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from sqlalchemy import func, select

from asyncjobq import JobRow
from cases.workers import FULL, Case, wait_until

WEIGHTS: Final = {"a": 1.0, "b": 2.0, "c": 5.0}
STARTS: Final = 1000 if FULL else 160
TOLERANCE: Final = 0.1 if FULL else 0.25
"""By which shares may be off; of a few jobs, one that took long is much."""
FLOOD: Final = 20_000 if FULL else 1500
STARTED: Final = select(func.count()).where(JobRow.started_at.is_not(None))
IN_FLIGHT: Final = select(func.count()).where(JobRow.in_flight)


async def first_starts(case: Case, count: int, workers: int, slots: int) -> list[Any]:
    """Run workers until so many jobs have started, and those have ended; return them in order."""
    started = [case.start_worker(f"W{n}", concurrency=slots) for n in range(workers)]
    await case.up(*started)
    query = (
        select(JobRow.group_key, JobRow.started_at, JobRow.finished_at)
        .where(JobRow.started_at.is_not(None))
        .order_by(JobRow.started_at, JobRow.id)
        .limit(count)
    )

    async def all_ended() -> Any:
        if (await case.rows(STARTED))[0][0] < count:
            return None
        rows = await case.rows(query)
        return rows if all(row.finished_at is not None for row in rows) else None

    rows = await wait_until(all_ended, 300.0, f"{count} jobs have started and ended")
    for worker in started:
        worker.kill()
        assert not worker.surprises(), worker.output()
    return list(rows)


def assert_by_weight(of: dict[str, float], one: dict[str, float], what: str) -> None:
    """Assert that shares follow the weights, but for `one` job of each group."""
    total, weights = sum(of.values()), sum(WEIGHTS.values())
    off = {group: of[group] / (total * WEIGHTS[group] / weights) - 1 for group in WEIGHTS}
    print(what, {group: f"{of[group]:.4g} ({off[group]:+.1%})" for group in WEIGHTS})
    for group, weight in WEIGHTS.items():
        fair = total * weight / weights
        assert abs(of[group] - fair) <= TOLERANCE * fair + one[group], (what, of)


@pytest.mark.parametrize(
    ("slots", "workers", "seconds", "slow"),
    [
        pytest.param(1, 1, 0.02, None, id="1 slot"),
        pytest.param(4, 1, 0.02, None, id="4 slots"),
        pytest.param(10, 1, 0.02, None, id="10 slots"),
        pytest.param(10, 4, 0.1, None, id="4 workers"),
        pytest.param(10, 1, 0.02, "a", id="a is slow"),
        pytest.param(10, 1, 0.02, "c", id="c is slow"),
    ],
)
async def test_slots_follow_weights(
    case: Case, slots: int, workers: int, seconds: float, slow: str | None
) -> None:
    times = {group: seconds * (10 if group == slow else 1) for group in WEIGHTS}
    for group, weight in WEIGHTS.items():
        labels = [f"{group} {n}" for n in range(STARTS)]
        await case.add_many(labels, seconds=times[group], group_key=group, weight=weight)
    rows = await first_starts(case, STARTS, workers, slots)
    held: dict[str, list[float]] = {group: [] for group in WEIGHTS}
    for row in rows:
        held[row.group_key].append((row.finished_at - row.started_at).total_seconds())
    # A job that took long cannot be taken back; where there are few, it counts.
    spare = {group: 0.0 if FULL else 2 * workers * max(of_it) for group, of_it in held.items()}
    assert_by_weight({group: sum(of_it) for group, of_it in held.items()}, spare, "seconds")
    if slow is None and FULL:  # of few, those whose jobs the machine delays have fewer
        starts = {group: float(len(of_it)) for group, of_it in held.items()}
        assert_by_weight(starts, dict.fromkeys(WEIGHTS, 0.0), "starts")


@pytest.mark.parametrize("flood", [{}, {"priority": -10}], ids=["equal", "of higher priority"])
async def test_few_behind_a_flood_start_in_the_first_two_rounds(
    case: Case, flood: dict[str, Any]
) -> None:
    slots = 4
    await case.add_many((f"many {n}" for n in range(FLOOD)), group_key="many", **flood)
    await case.add_many((f"ten {n}" for n in range(10)), group_key="ten")
    await case.add("one", group_key="one")
    rows = await first_starts(case, 60, 1, slots)
    order = [row.group_key for row in rows]
    print("".join(group[0] for group in order))
    assert {"ten", "one"} <= set(order[: 2 * slots])
    assert order.index("one") < 2 * slots
    assert order[:40].count("ten") == 10

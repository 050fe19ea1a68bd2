"""What a worker knows of its limits between two claims."""

from __future__ import annotations

from math import inf

import pytest

from asyncjobq import Concurrency, RateLimit, openings
from asyncjobq.limit_rules import Use
from asyncjobq.openings import FIRST_PAUSE, Openings

GPU = Use(Concurrency("gpu", 1), "")
API = Use(RateLimit("api", 1, per=1), "")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(openings, "monotonic", lambda: now[0])
    return now


def test_a_limit_is_closed_until_its_time(clock: list[float]) -> None:
    known = Openings(pause=10.0)
    known.note({API.place: 3.0})
    assert known.closed([GPU, API])
    assert not known.closed([GPU])
    assert known.next == 3.0
    clock[0] += 3.1
    assert not known.closed([API])
    assert known.take_reopened() == [API.place]
    assert known.next == inf


def test_a_permit_is_asked_for_again_ever_more_seldom(clock: list[float]) -> None:
    """So that what is given back elsewhere is taken soon, and what never is costs little."""
    known = Openings(pause=1.0)
    pauses = []
    for _ in range(9):
        known.note({GPU.place: None})
        pauses.append(known.next)
        clock[0] += pauses[-1] + 1e-6
    assert pauses[:3] == pytest.approx([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE])
    assert pauses[-2:] == pytest.approx([1.0, 1.0])
    for before, pause in enumerate(pauses):
        assert pause <= sum(pauses[:before]) + 2 * FIRST_PAUSE
    known.started([GPU])
    known.note({GPU.place: None})
    assert known.next == pytest.approx(FIRST_PAUSE)


def test_never_later_than_the_poll() -> None:
    known = Openings(pause=FIRST_PAUSE / 2)
    known.note({GPU.place: None})
    assert known.next == pytest.approx(FIRST_PAUSE / 2)


def test_news_open_what_waits_for_a_job_and_not_what_waits_for_time() -> None:
    known = Openings(pause=10.0)
    known.note({GPU.place: None, API.place: 3.0})
    known.told()
    assert known.take_reopened() == [GPU.place]
    assert known.closed([API])
    known.ended([API])
    assert known.take_reopened() == [API.place]

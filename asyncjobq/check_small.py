"""The rules of unique keys, and of the tables beside `jobs`; see check_rules.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import ColumnElement, and_, exists, or_

from asyncjobq.backends.base import Backend
from asyncjobq.check_rules import JOB_RULES, Rule, ended
from asyncjobq.states import NOT_STARTED, UniqueWhile


def _key_held_wrongly(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    other = or_(jobs.c.unique_key.is_(None), jobs.c.unique_held != jobs.c.unique_key)
    over = and_(ended(jobs), jobs.c.unique_until.is_(None))
    started = and_(jobs.c.in_flight, jobs.c.unique_while == UniqueWhile.WAITING)
    return [and_(jobs.c.unique_held.is_not(None), or_(other, over, started))]


def _key_lost(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs = backend.tables.jobs
    unstarted = and_(
        jobs.c.unique_while == UniqueWhile.WAITING,
        jobs.c.lease_token == 0,
        jobs.c.state.in_(sorted(NOT_STARTED)),
    )
    should = or_(and_(jobs.c.unique_while == UniqueWhile.LIVE, ~ended(jobs)), unstarted)
    keyed = and_(jobs.c.unique_key.is_not(None), jobs.c.unique_until.is_(None))
    return [and_(keyed, jobs.c.unique_held.is_(None), should)]


def _note_missing(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, keys = backend.tables.jobs, backend.tables.keys
    noted = exists().where(keys.c.held == jobs.c.unique_held, keys.c.job_id == jobs.c.id)
    return [and_(jobs.c.unique_held.is_not(None), ~noted.correlate(jobs))]


def _note_stale(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, keys = backend.tables.jobs, backend.tables.keys
    holds = exists().where(jobs.c.id == keys.c.job_id, jobs.c.unique_held == keys.c.held)
    return [~holds.correlate(keys)]


def _edge_of_nobody(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, deps = backend.tables.jobs, backend.tables.deps
    return [~exists().where(jobs.c.id == deps.c.job_id).correlate(deps)]


def _attempt_of_nobody(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    jobs, attempts = backend.tables.jobs, backend.tables.attempts
    return [~exists().where(jobs.c.id == attempts.c.job_id).correlate(attempts)]


def _permit_of_nothing(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    limits, permits = backend.tables.limits, backend.tables.permits
    return [~exists().where(limits.c.id == permits.c.limit_id).correlate(permits)]


def _paused_but_fires(backend: Backend, _grace: float) -> Sequence[ColumnElement[bool]]:
    schedules = backend.tables.schedules
    return [and_(schedules.c.paused, schedules.c.next_fire.is_not(None))]


KEY_RULES: Final = (
    Rule(
        "key held wrongly",
        "holds a unique key that is not its own, or that it should have given up",
        "The key is given up.",
        _key_held_wrongly,
    ),
    Rule(
        "key lost",
        "does not hold its unique key, and should",
        "It takes the key back, unless another job holds it by now.",
        _key_lost,
    ),
)
NOTED_KEY_RULES: Final = (
    Rule(
        "key not noted",
        "holds a unique key that the table of keys does not have as its",
        "The key is noted, or given up if it is noted as another job's.",
        _note_missing,
    ),
    Rule(
        "key noted for nobody",
        "is noted as held by a job that does not hold it",
        "The note is deleted.",
        _note_stale,
        key=lambda tables: tables.keys.c.held,
        sliced=False,
    ),
)
ROW_RULES: Final = (
    Rule(
        "permit without limit",
        "has a permit of a limit that does not exist",
        "The permit is deleted.",
        _permit_of_nothing,
        key=lambda tables: tables.permits.c.job_id,
        sliced=False,
    ),
    Rule(
        "paused schedule that fires",
        "is paused, but has a time at which it fires next",
        "The time is taken out.",
        _paused_but_fires,
        key=lambda tables: tables.schedules.c.name,
        sliced=False,
    ),
    Rule(
        "edge of no job",
        "does not exist, but has an edge to another job",
        "The edge is deleted.",
        _edge_of_nobody,
        key=lambda tables: tables.deps.c.job_id,
    ),
    Rule(
        "attempt of no job",
        "does not exist, but has attempts that failed",
        "They are deleted.",
        _attempt_of_nobody,
        key=lambda tables: tables.attempts.c.job_id,
    ),
)


def rules_for(backend: Backend) -> tuple[Rule, ...]:
    """Return the rules of this database, those that an index serves first."""
    noted = NOTED_KEY_RULES if backend.notes_keys else ()
    rules = (*JOB_RULES, *KEY_RULES, *noted, *ROW_RULES)
    return tuple(sorted(rules, key=lambda rule: rule.sliced))

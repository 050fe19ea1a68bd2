"""A scheduler's settings, checked before anything is connected to."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from asyncjobq.clock import seconds
from asyncjobq.codec import MAX_BYTES, printable
from asyncjobq.errors import ConfigurationError, InvalidJobError
from asyncjobq.handlers import Handlers
from asyncjobq.options import LONGEST, NO_TIMEOUT, check_text
from asyncjobq.states import TERMINAL, State

Duration = float | timedelta


@dataclass(frozen=True)
class Settings:
    """How a worker works; durations in seconds."""

    worker_id: str
    concurrency: int
    queues: Mapping[str, int]
    """Slots by queue."""
    lease_ttl: float
    poll_interval: float
    stop_timeout: float
    default_timeout: float
    max_result_bytes: int
    retention: Mapping[State, float]
    """After how long jobs are deleted, by the state in which they ended."""

    def overridden(
        self, *, concurrency: int | None = None, queues: Iterable[str] | None = None
    ) -> Settings:
        """Return these settings with other slots or queues, as a command line asks for them.

        A queue that has fewer slots than the worker keeps its own number.
        """
        slots = self.concurrency if concurrency is None else _whole("concurrency", concurrency)
        fewer = {name: most for name, most in self.queues.items() if most != self.concurrency}
        names = self.queues if queues is None else _queues(queues, slots)
        kept = {name: fewer.get(name, slots) for name in names}
        return replace(self, concurrency=slots, queues=kept)


def checked_settings(
    *,
    worker_id: str | None,
    concurrency: int,
    queues: Iterable[str] | Mapping[str, int],
    lease_ttl: Duration,
    poll_interval: Duration,
    stop_timeout: Duration,
    default_timeout: Duration | None,
    max_result_bytes: int,
    retention: Mapping[Any, Duration] | None = None,
) -> Settings:
    """Return the settings; raises ConfigurationError saying what is wrong with which."""
    slots = _whole("concurrency", concurrency)
    return Settings(
        worker_id=_worker_id(worker_id),
        concurrency=slots,
        queues=_queues(queues, slots),
        lease_ttl=_at_least("lease_ttl", lease_ttl, 1.0),
        poll_interval=_at_least("poll_interval", poll_interval, 0.01),
        stop_timeout=_at_least("stop_timeout", stop_timeout, 0.0),
        default_timeout=(
            NO_TIMEOUT
            if default_timeout is None
            else min(LONGEST, _at_least("default_timeout", default_timeout, 0.001))
        ),
        max_result_bytes=_result_bytes(max_result_bytes),
        retention=_retention(retention),
    )


def _at_least(name: str, value: Duration, least: float) -> float:
    number = seconds(value, name)
    if number < least:
        raise ConfigurationError(f"{name} must be at least {least:g} seconds, not {number:g}.")
    if number > LONGEST:
        raise ConfigurationError(f"{name} must be at most a century, not {number:g} seconds.")
    return number


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be an int of at least 1, not {value!r}.")
    return value


def _result_bytes(value: Any) -> int:
    if _whole("max_result_bytes", value) > MAX_BYTES:
        raise ConfigurationError(
            f"max_result_bytes may be {MAX_BYTES:,} at most: servers refuse longer statements. Put "
            "larger results elsewhere, and their address into the job."
        )
    return int(value)


def _retention(given: Any) -> dict[State, float]:
    if not isinstance(given or {}, Mapping):
        raise ConfigurationError(
            "retention takes a duration for each state, {'done': timedelta(days=7)}, not "
            f"{given!r}."
        )
    states = ended_states(list(given or ()), "retention")
    ages = (given or {}).values()
    return {s: _at_least("retention", age, 0.0) for s, age in zip(states, ages, strict=True)}


def ended_states(given: Any, name: str) -> list[State]:
    """Return states in which jobs have ended; raises ConfigurationError for others."""
    try:
        states = [State(state) for state in ([given] if isinstance(given, str) else given)]
    except (TypeError, ValueError):
        states = list(State)
    if not TERMINAL.issuperset(states):
        known = ", ".join(repr(str(state)) for state in sorted(TERMINAL))
        raise ConfigurationError(f"{name} takes states of ended jobs ({known}), not {given!r}.")
    return states


def checked_registries(given: Any) -> tuple[Handlers, ...]:
    """Return what a scheduler's `handlers` names; raises ConfigurationError for what is none."""
    if isinstance(given, Handlers):
        raise ConfigurationError("handlers takes several registries: handlers=[media].")
    registries = tuple(given) if isinstance(given, Iterable) else (given,)
    for registry in registries:
        if not isinstance(registry, Handlers):
            raise ConfigurationError(
                f"handlers takes registries, each a Handlers(), not {registry!r}; a handler "
                "belongs to the one whose handler(...) decorates it."
            )
    return registries


def _queues(queues: Any, concurrency: int) -> dict[str, int]:
    if isinstance(queues, str):
        raise ConfigurationError(f"queues takes several names: queues=({queues!r},).")
    if not isinstance(queues, Iterable):
        raise ConfigurationError(f"queues takes names, or a dict of slots, not {queues!r}.")
    if isinstance(queues, Mapping):
        named = {name: _whole(f"queues[{name!r}]", most) for name, most in queues.items()}
    else:
        named = dict.fromkeys(queues, concurrency)
    for name in named:
        _text("A queue's name", name, 64)
    if not named:
        raise ConfigurationError("queues must name at least one queue.")
    return named


def _worker_id(given: str | None) -> str:
    if given is None:
        host = printable(socket.gethostname())[:150]
        return f"{host}-{os.getpid()}-{os.urandom(4).hex()}"
    return _text("worker_id", given, 255)


def _text(name: str, value: Any, longest: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        raise ConfigurationError(f"{name} has 1 to {longest} characters; {value!r} does not.")
    try:
        check_text(name, value, longest)
    except InvalidJobError as error:
        raise ConfigurationError(str(error)) from error
    return value

"""One worker's dealings with limits: which lanes are open, and what the claims have found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection

from asyncjobq.backends.base import Backend, Lane, LaneKey, LaneKind, Take
from asyncjobq.lease import Claimed
from asyncjobq.limit_rules import LimitRules, Place, Use
from asyncjobq.limited import kept_uses
from asyncjobq.limits import GROUP, Capacity, Limit, amount_of
from asyncjobq.openings import Capacities, Openings
from asyncjobq.permits import limit_settings, places_without_room
from asyncjobq.ready import Skipped

HELD: Final = 20_000
"""Limits without room whose lanes are remembered."""

LanePlace = tuple[str, str, str, str]

SKIPPED_KEYS: Final = 200
"""Closed keys that one scan passes over as ranges."""


class Limiter:
    """Opens and closes lanes by the limits of their jobs."""

    def __init__(self, rules: LimitRules, pause: float, ring: Callable[[], None]) -> None:
        """After `pause` seconds, what a job elsewhere has freed is noticed without being told."""
        self.rules = rules
        self._openings = Openings(pause)
        capacities = [limit for limit in rules.by_name.values() if isinstance(limit, Capacity)]
        self._capacities = Capacities(capacities, ring)
        self._names = tuple(
            limit.name for limit in rules.by_name.values() if not isinstance(limit, Capacity)
        )
        self._settings: dict[str, tuple[Any, ...]] = {}
        self._closed_keys: dict[LaneKey, tuple[Use, ...]] = {}
        self._held: dict[Place, dict[LanePlace, Lane]] = {}

    @property
    def opens_in(self) -> float:
        """Seconds until a limit without room may have some."""
        return self._openings.next

    def read_settings(
        self, connection: Connection, backend: Backend
    ) -> Mapping[str, tuple[Any, ...]]:
        """Return what was set for the limits at runtime."""
        return limit_settings(connection, backend, self._names) if self._names else {}

    def note_settings(self, settings: Mapping[str, tuple[Any, ...]]) -> bool:
        """Open the limits whose settings have changed since the last call; tell if any have."""
        before, self._settings = self._settings, dict(settings)
        names = {*before, *settings}
        changed = {name for name in names if before.get(name) != settings.get(name)}
        self._openings.changed(changed)
        return bool(changed)

    def allows_nothing(self, kind: LaneKind) -> str | None:
        """Return the name of a limit because of which no job of a queue and type ever starts."""
        limits = (limit for limit in self.rules.of(*kind) if not isinstance(limit, Capacity))
        return next((limit.name for limit in limits if self._amount(limit) <= 0), None)

    def _amount(self, limit: Limit) -> float:
        if limit.name in self._settings:
            return float(self._settings[limit.name][0])
        return amount_of(limit)

    async def ask(self) -> None:
        """Ask the capacities how many jobs may start."""
        await self._capacities.ask()

    def open(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Return the lanes of which a job may start, as far as this worker knows."""
        return [lane for lane in lanes if self._is_open(lane)]

    def skipped(self, kinds: Iterable[LaneKind]) -> Skipped:
        """Return which of these queues and types, and which keys in them, have no room now.

        Keys that were met, and of those the last ones: of any other, its lanes are looked at.
        """
        closed = self._openings.closed
        kept = {key: uses for key, uses in self._closed_keys.items() if closed(uses)}
        self._closed_keys = kept
        shut = frozenset(kind for kind in kinds if not self._has_room(self._unkeyed(kind)))
        return Skipped(shut, frozenset(key for key in kept if key[:2] not in shut))

    def take_reopened(self) -> list[Lane]:
        """Return lanes that were closed each by a limit of its own, and may be open now."""
        places = self._openings.take_reopened()
        return [lane for place in places for lane in self._held.pop(place, {}).values()]

    def is_limited(self, lane: Lane) -> bool:
        """Tell whether the jobs of a lane have limits."""
        return bool(self.rules.of(lane.queue, lane.type))

    def parted(self, takes: Sequence[Take]) -> tuple[list[Take], list[Take]]:
        """Return the takes without limits, and those with limits as far as capacities allow."""
        plain = [take for take in takes if not self.is_limited(take.lanes[0])]
        limited: list[Take] = []
        for take in takes:
            if self.is_limited(take.lanes[0]):
                uses = self.rules.uses(take.lanes[0])
                count = int(min(take.count, self._capacities.room(uses)))
                self._capacities.reserve(uses, count)
                limited.append(Take(take.lanes, count))
        return plain, [take for take in limited if take.count > 0]

    def started(self, jobs: Iterable[Claimed]) -> None:
        """Note which jobs have started here."""
        for job in jobs:
            self._openings.started(self.rules.uses(job))

    def note(self, waits: Mapping[Place, float | None]) -> None:
        """Take over which limits have no room."""
        self._openings.note(waits)

    def look_once(
        self, connection: Connection, backend: Backend, lanes: Sequence[Lane]
    ) -> dict[Place, float | None]:
        """Return which limits of these lanes have no room, without locking them."""
        uses = {
            use
            for lane in lanes
            if self.is_limited(lane) and self.rules.has_keys_of(lane)
            for use in kept_uses(self.rules.uses(lane))
        }
        return places_without_room(connection, backend, uses)

    def ended(self, job: Claimed) -> None:
        """Note that a job has ended here, which may have made room."""
        self._openings.ended(self.rules.uses(job))

    def told(self) -> None:
        """Note that a job may have ended elsewhere."""
        self._openings.told()

    def close(self) -> None:
        """Ask nothing more."""
        self._capacities.close()

    def _is_open(self, lane: Lane) -> bool:
        if not self.is_limited(lane):
            return True
        uses = self.rules.uses(lane)
        if self._has_room(uses):
            return True
        of_key = tuple(use for use in uses if use.limit.argument is not None)
        if self._openings.closed(of_key):
            self._note_closed((lane.queue, lane.type, lane.limit_key), of_key)
        for use in uses:
            if use.limit.key == GROUP and self._openings.closed([use]):
                self._hold(lane, use.place)
        return False

    def _hold(self, lane: Lane, place: Place) -> None:
        self._held.setdefault(place, {})[lane.place] = lane
        if len(self._held) > HELD:
            del self._held[next(iter(self._held))]

    def _has_room(self, uses: Collection[Use]) -> bool:
        return not self._openings.closed(uses) and self._capacities.room(uses) >= 1

    def _unkeyed(self, kind: LaneKind) -> list[Use]:
        """Return the limits that hold alike for all jobs of a queue and type."""
        return [Use(limit, "") for limit in self.rules.of(*kind) if limit.key is None]

    def _note_closed(self, key: LaneKey, uses: tuple[Use, ...]) -> None:
        self._closed_keys.pop(key, None)
        self._closed_keys[key] = uses
        if len(self._closed_keys) > SKIPPED_KEYS:
            del self._closed_keys[next(iter(self._closed_keys))]

"""What is to be said of a job, in words: pure, an explanation's data in, sentences out.

What comes from the database is written so that nothing in it acts on a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from asyncjobq.codec import gist
from asyncjobq.explanation import Awaited, Explanation, Reason, Related, Why
from asyncjobq.job import OnFailure
from asyncjobq.limit_states import LimitState
from asyncjobq.states import IN_FLIGHT, TERMINAL, Kind, State


def reasons_of(found: Explanation) -> Iterator[Reason]:
    """Yield what is to be said, the most important first."""
    state = found.job.state
    if state in TERMINAL:
        yield from _ended(found)
    elif state in IN_FLIGHT:
        yield from _leased(found)
    elif state is State.WAITING:
        yield from _waiting(found)
    else:
        yield from _held(found)
    if not found.settled:
        yield from _unsettled(found)


# -- before it runs -----------------------------------------------------------------------------


def _held(found: Explanation) -> Iterator[Reason]:
    job = found.job
    if job.state is State.BLOCKED:
        yield from _blocked(found)
    if found.due_in is not None:
        yield from _time(found, found.due_in)
    for pause in found.paused:
        what = f"queue {pause.queue!r}" if pause.queue is not None else f"type {pause.type!r}"
        yield Reason(
            Why.PAUSED, f"The {what} is paused since {pause.paused_at:%Y-%m-%d %H:%M:%S} UTC."
        )
    if job.kind is Kind.JOB:
        yield from _workers(found)
    if job.state is State.READY:
        yield from _ready(found)
    if job.attempt:
        error = f": {gist(job.error, 200)}" if job.error else ""
        yield Reason(Why.RETRY, f"Attempt {job.attempt} did not succeed{error}.{_left(found)}")


def _blocked(found: Explanation) -> Iterator[Reason]:
    own = [awaited for awaited in found.upstreams if awaited.waiting_id == found.job.id]
    around = [awaited for awaited in found.upstreams if awaited.waiting_id != found.job.id]
    if own:
        more = not around and found.upstreams_open.number > len(own)
        total = f" of {found.upstreams_open}" if more else ""
        count = f"{len(own)}{total} jobs" if len(own) > 1 or total else "a job"
        yield Reason(Why.UPSTREAMS, f"It depends on {count} not done: {_awaited(own)}.")
    if found.parent is not None:
        parent = f"It is in {_name(found.parent)}, which is {found.parent.state}"
        reason = f" and waits for {_awaited(around)}" if around else ""
        yield Reason(Why.PARENT, f"{parent}{reason}.")
    elif not own and found.settled:
        yield Reason(
            Why.UPSTREAMS, "All that it depends on is done; `asyncjobq doctor` looks into it."
        )


def _awaited(awaited: Iterable[Awaited]) -> str:
    return ", ".join(
        f"{_name(one.upstream)}, {one.upstream.state or 'which is gone'}"
        + (" (it runs also if that fails)" if one.on_failure is OnFailure.RUN else "")
        for one in awaited
    )


def _time(found: Explanation, due_in: float) -> Iterator[Reason]:
    when = "" if found.job.run_after is None else f"{found.job.run_after:%Y-%m-%d %H:%M:%S} UTC"
    if due_in > 0:
        yield Reason(Why.TIME, f"Its time comes in {duration(due_in)}, at {when}.")
    else:
        yield Reason(
            Why.TIME,
            (
                f"It has been due for {duration(-due_in)}, since {when}: the next poll of "
                "any worker makes it ready."
            ),
        )


def _workers(found: Explanation) -> Iterator[Reason]:
    job, workers = found.job, found.workers
    if workers is None or workers.both:
        return
    stopping = f" ({workers.stopping} that would serve it are stopping)" if workers.stopping else ""
    if not workers.live:
        text = f"No worker is live{stopping}: start one, e.g. `asyncjobq worker MODULE:OBJECT`."
    elif not workers.in_queue:
        text = f"None of the {workers.live} live workers serves the queue {job.queue!r}{stopping}."
    elif not workers.with_handler:
        text = f"None of the {workers.live} live workers has a handler for {job.type!r}{stopping}."
    else:
        text = (
            f"No live worker both serves the queue {job.queue!r} and has a handler for "
            f"{job.type!r}{stopping}."
        )
    yield Reason(Why.NO_WORKER, text)


def _ready(found: Explanation) -> Iterator[Reason]:
    workers, line = found.workers, found.line
    served = workers is not None and workers.both > 0
    full = [limit for limit in found.limits if limit.full]
    for limit in full:
        yield Reason(Why.LIMIT, _limit(limit))
    if line is not None and (line.before or line.groups.number > 1):
        yield Reason(Why.BEHIND, _line(found))
    if workers is not None and served and not workers.free:
        yield Reason(Why.SLOTS, f"All {workers.slots} slots for its queue are taken by other jobs.")
    held = full or found.paused or found.due_in is not None or (line is not None and line.before)
    if served and not held and workers is not None and workers.free:
        yield Reason(Why.NEXT, "Nothing holds it: a worker that serves it starts it in a moment.")
    for limit in found.limits:
        if limit.full is None:
            yield Reason(
                Why.CAPACITY,
                f"The capacity {limit.name!r} guards it; only workers know whether that has room.",
            )
    if not found.limits_known:
        yield Reason(
            Why.LIMITS_UNKNOWN,
            f"Limits of {found.job.type!r} itself could not be looked at: its handler is not "
            "known here. Ask the application's own scheduler.",
        )


def _limit(limit: LimitState) -> str:
    of = f" of {limit.value!r}" if limit.value else ""
    per = "" if limit.per is None else f" per {duration(limit.per)}"
    if limit.opens_in is None:
        opens = "when a job under it ends"
    elif limit.opens_in == inf:
        opens = "not before it is changed"
    else:
        opens = f"in {duration(limit.opens_in)}"
    kinds = {"rate": f"{limit.amount:g} starts{per}", "budget": f"a cost of {limit.amount:g}{per}"}
    allows = kinds.get(limit.kind, f"{limit.amount:g} at a time")
    used = "" if limit.kind == "rate" else f"; {limit.used:g} are used"
    return (
        f"The limit {limit.name!r}{of} has no room: it allows {allows}{used}. There is room {opens}"
        "."
    )


def _line(found: Explanation) -> str:
    line = found.line
    if line is None:
        return ""
    group = f"the group {line.group_key!r}" if line.group_key else "the group without a key"
    before = (
        f"{line.before} {'job is' if str(line.before) == '1' else 'jobs are'} before it in {group}"
        if line.before
        else f"It is the first of {group}"
    )
    if line.groups.number <= 1:
        return f"{before}, which shares the slots with no other."
    return (
        f"{before}; that has the weight {line.weight:g}, and {line.share:.0%} of the slots beside "
        f"the {line.groups} groups that have ready jobs."
    )


# -- while it runs, and after -------------------------------------------------------------------


def _leased(found: Explanation) -> Iterator[Reason]:
    job, lease = found.job, found.lease
    if lease is None:
        yield Reason(Why.LEASED, "It is leased by nobody; `asyncjobq doctor` looks into it.")
        return
    gone = " (not seen lately)" if lease.worker_live is False else ""
    worker = f"the worker {lease.worker!r}{gone}"
    attempt = f"attempt {job.attempt}" + (
        "" if found.max_attempts is None else f" of {found.max_attempts}"
    )
    if lease.expires_in < 0:
        yield Reason(
            Why.LEASE_OVER,
            (
                f"It ran in {worker}, whose lease is over for {duration(-lease.expires_in)}, in "
                f"{attempt}: the next poll of any worker takes it back."
            ),
        )
    else:
        ends = "" if lease.ends_in is None else f", and has {duration(max(0, lease.ends_in))} left"
        yield Reason(
            Why.LEASED,
            (
                f"It runs in {worker} for {duration(lease.runs_for)}{ends}: {attempt}, leased for "
                f"another {duration(lease.expires_in)}."
            ),
        )
    if job.cancel_requested:
        yield from _cancelling(found)


def _waiting(found: Explanation) -> Iterator[Reason]:
    if found.job.cancel_requested:
        yield from _cancelling(found)
    total, named = found.children_open, found.children
    if total:
        more = f" of {total}" if total.more or total.number > len(named) else ""
        count = f"{len(named)}{more} jobs" if len(named) > 1 or more else "a job"
        names = ", ".join(f"{_name(child)}, {child.state}" for child in named)
        yield Reason(Why.CHILDREN, f"It waits for {count} in it: {names}.")
    elif found.settled:
        yield Reason(Why.CHILDREN, "All in it has ended; `asyncjobq doctor` looks into it.")


def _cancelling(found: Explanation) -> Iterator[Reason]:
    yield Reason(Why.CANCELLING, "Its end was asked for" + _because(found) + ".")


def _ended(found: Explanation) -> Iterator[Reason]:
    job = found.job
    when = "" if job.finished_at is None else f" at {job.finished_at:%Y-%m-%d %H:%M:%S} UTC"
    tries = "" if job.attempt < 2 else f" in attempt {job.attempt}"
    reason = f": {gist(job.error, 300)}" if job.error else ""
    if job.state is State.DONE:
        yield Reason(Why.DONE, f"It ended{when}{tries}.")
    elif job.state is State.FAILED:
        yield Reason(Why.FAILED, f"It failed{when}{tries}{reason}.")
    else:
        yield Reason(Why.CANCELLED, f"It was cancelled{when}{reason}.")
    if found.cause:
        yield Reason(Why.CAUSE, f"That was{_because(found)}.")


def _because(found: Explanation) -> str:
    if not found.cause:
        return ""
    chain = ", because of ".join(
        f"{_name(one)}, {one.state or 'which is gone'}"
        + (f" ({gist(one.error, 200)})" if one.error else "")
        for one in found.cause
    )
    return f" because of {chain}"


def _unsettled(found: Explanation) -> Iterator[Reason]:
    if found.job.state in TERMINAL:
        what = "The jobs that depend on it, and what it is in, have not been told of its end"
    elif found.job.cancel_requested:
        what = "What is in it has not been told that it is cancelled"
    else:
        what = "Whether it, or what is in it, may go on has not been looked at"
    live = found.workers is not None and found.workers.live > 0
    who = "a worker does that in a moment" if live else "a worker does that, and none is live"
    yield Reason(Why.UNSETTLED, f"{what} for {duration(found.unsettled_for)}: {who}.")


def _left(found: Explanation) -> str:
    left = found.attempts_left
    if left is None:
        return ""
    return f" {left} attempts are left." if left != 1 else " One attempt is left."


def _name(job: Related) -> str:
    name = job.name or job.type
    return f"job {job.id}" if name is None else f"job {job.id} ({name!r})"


def duration(seconds: float) -> str:
    """Return a time in the two largest of its units: "3 min 20 s"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
    return " ".join(part for part in parts[:2] if part)

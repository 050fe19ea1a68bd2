"""Small breakages of the library, each of which some test of the conformance suite must notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ALL: Final = ("sqlite", "postgresql", "mysql", "mariadb")
SERVERS: Final = ("postgresql", "mysql", "mariadb")
MYSQL: Final = ("mysql", "mariadb")
NONE: Final = ("none",)
"""For tests that need no database."""


@dataclass(frozen=True)
class Breakage:
    """One change of one file, the tests that have to fail for it, and where.

    `unharmed` is a test that must still pass: the library is to be wrong, not broken to pieces.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    backends: tuple[str, ...] = ALL
    unharmed: str = "test_schema.py::test_the_version_is_stored"


_NOW: Final = '__import__("datetime").datetime.now(__import__("datetime").UTC)'
_IN: Final = '__import__("datetime").timedelta(seconds=ttl)'
_UNLOCKED: Final = (
    "{{row.id: row for row in connection.execute("
    "_columns(backend).where(backend.tables.jobs.c.id.in_({})))}}"
)
_ANYBODY: Final = (
    'type(lease.row)(*connection.execute(__import__("sqlalchemy").select(jobs.c.id, '
    "jobs.c.lease_owner, jobs.c.lease_token).where(jobs.c.id == lease.job_id)).one())"
)
"""In place of a lease: whoever has the job."""

BREAKAGES: Final = (
    # -- the fence ------------------------------------------------------------------------------
    Breakage(
        "finalize compares no token",
        "finalize.py",
        "if (row.lease_owner, row.lease_token) != (item.lease.owner, item.lease.token):",
        "if row.lease_owner != item.lease.owner:",
        (
            "test_finalize.py::TestBatch::test_of_anybody_else_is_lost",
            "test_reclaim.py::TestLateOwner::test_changes_nothing",
        ),
    ),
    Breakage(
        "finalize compares no owner",
        "finalize.py",
        "if (row.lease_owner, row.lease_token) != (item.lease.owner, item.lease.token):",
        "if row.lease_token != item.lease.token:",
        ("test_finalize.py::TestBatch::test_of_anybody_else_is_lost",),
    ),
    Breakage(
        "a renewal compares no token",
        "lease.py",
        "owned = (row.lease_owner, row.lease_token) == (lease.owner, lease.token)",
        "owned = row.lease_owner == lease.owner",
        (
            "test_lease.py::TestRenewal::test_by_anybody_else_is_lost",
            "test_reclaim.py::TestLateOwner::test_changes_nothing",
        ),
    ),
    Breakage(
        "a renewal compares no owner",
        "lease.py",
        "owned = (row.lease_owner, row.lease_token) == (lease.owner, lease.token)",
        "owned = row.lease_token == lease.token",
        ("test_lease.py::TestRenewal::test_by_anybody_else_is_lost",),
    ),
    Breakage(
        "the write itself carries no token",
        "transition.py",
        'jobs.c.lease_token == new("row_token"',
        'jobs.c.lease_token <= new("row_token"',
        ("test_reclaim.py::test_every_write_for_a_lease_carries_its_fence",),
    ),
    Breakage(
        "the token does not go up",
        "lease.py",
        '"lease_token": jobs.c.lease_token + 1,',
        '"lease_token": jobs.c.lease_token + 0,',
        (
            "test_lease.py::TestClaim::test_the_token_goes_up_for_ever",
            "test_reclaim.py::TestLateOwner::test_changes_nothing",
        ),
    ),
    Breakage(
        "a renewal's write carries no fence",
        "lease.py",
        ".where(jobs.c.id.in_([lease.job_id for lease in chunk]), _fence(jobs, chunk))",
        ".where(jobs.c.id.in_([lease.job_id for lease in chunk]))",
        ("test_reclaim.py::test_every_write_for_a_lease_carries_its_fence",),
    ),
    Breakage(
        "an outcome that was written before is lost",
        "finalize.py",
        "    _part_written(connection, backend, result)\n",
        "",
        (
            "test_finalize.py::TestAgain::test_is_known_as_written",
            "test_serve.py::TestServe::test_counts_what_was_written_although_it_was_not_told_so",
        ),
    ),
    Breakage(
        "whatever has its token counts as written before",
        "finalize.py",
        "row.lease_token != item.lease.token or row.error != item.outcome.error",
        "row.lease_token != item.lease.token",
        ("test_finalize.py::TestAgain::test_is_lost_where_another_wrote_the_end",),
    ),
    Breakage(
        "one broken connection refuses an outcome",
        "writer.py",
        "if self._database.backend.fault_of(error) is Fault.DATA:",
        "if self._database.backend.fault_of(error) is not Fault.CONFLICT:",
        ("test_writer.py::TestWriter::test_one_that_breaks_the_connection_for_a_while_is_written",),
    ),
    Breakage(
        "an outcome that breaks its connection is tried for ever",
        "writer.py",
        "return self._breaks[item.lease] >= BREAKS",
        "return False",
        ("test_writer.py::TestWriter::test_one_that_breaks_the_connection_holds_up_no_other",),
    ),
    Breakage(
        "a job that cannot be started strands its claim",
        "tick.py",
        "except Exception as error:  # the others are leased too, and must not be left so",
        "except LookupError as error:",
        ("test_serve.py::TestServe::test_one_that_cannot_be_started_strands_no_other",),
    ),
    Breakage(
        "slots that are freed meanwhile go to those who were there before",
        "tick.py",
        "and total < most:\n"
        "            takes = self._share.allocate(\n"
        "                lanes, self._slots.free_by_queue, most - total,",
        "and self._slots.free > 0:\n"
        "            takes = self._share.allocate(\n"
        "                lanes, self._slots.free_by_queue, self._slots.free,",
        ("test_serve.py::TestWhereJobsEndAsFastAsTheyAreClaimed::test_others_have_their_turn",),
    ),
    # -- locks ----------------------------------------------------------------------------------
    Breakage(
        "PostgreSQL waits for locked rows",
        "backends/postgresql.py",
        "key_share=True, skip_locked=True, of=of)",
        "key_share=True, skip_locked=False, of=of)",
        ("test_lease.py::TestRenewal::test_goes_round_what_somebody_holds",),
        ("postgresql",),
    ),
    Breakage(
        "PostgreSQL's claim waits for locked rows",
        "backends/postgresql.py",
        ".with_for_update(key_share=True, skip_locked=True, of=jobs)",
        ".with_for_update(key_share=True, skip_locked=False, of=jobs)",
        ("test_lease.py::TestClaimBesideOthers::test_goes_round_what_another_is_claiming",),
        ("postgresql",),
    ),
    Breakage(
        "PostgreSQL's claim minds a caller's foreign key",
        "backends/postgresql.py",
        ".with_for_update(key_share=True, skip_locked=True, of=jobs)",
        ".with_for_update(key_share=False, skip_locked=True, of=jobs)",
        ("test_lease.py::TestClaimBesideOthers::test_finds_jobs_to_which_a_caller_holds_an_edge",),
        ("postgresql",),
    ),
    Breakage(
        "MySQL waits for locked rows",
        "backends/mysql.py",
        "return self.by_key(query, table).with_for_update(skip_locked=True)",
        "return self.by_key(query, table).with_for_update(skip_locked=False)",
        (
            "test_lease.py::TestRenewal::test_goes_round_what_somebody_holds",
            "test_lease.py::TestClaimBesideOthers::test_goes_round_what_another_is_claiming",
        ),
        MYSQL,
    ),
    Breakage(
        "a reclaim does not lock what it takes back",
        "lease.py",
        "backend.lock_rows(connection, ids, columns, jobs.c.in_flight, expired, ending=True)",
        "connection.execute(select(*columns).where(jobs.c.id.in_(ids))).all()",
        ("test_reclaim.py::TestReclaim::test_with_a_renewal_at_any_moment",),
        SERVERS,
    ),
    # -- the claim ------------------------------------------------------------------------------
    Breakage(
        "the claim takes jobs of any state",
        "ready.py",
        "        in_state(jobs, State.READY),\n        ~unsatisfied",
        "        jobs.c.id > 0,\n        ~unsatisfied",
        ("test_ready.py::TestFiveConditions::test_the_state",),
    ),
    Breakage(
        "the claim takes jobs with unsatisfied edges",
        "ready.py",
        "        ~unsatisfied.correlate(jobs),\n",
        "",
        ("test_ready.py::TestFiveConditions::test_no_unsatisfied_edge",),
    ),
    Breakage(
        "the claim takes containers",
        "ready.py",
        "        jobs.c.kind == Kind.JOB,\n",
        "",
        ("test_ready.py::TestFiveConditions::test_no_container",),
    ),
    Breakage(
        "the claim takes jobs before their time",
        "ready.py",
        "        or_(jobs.c.run_after.is_(None), jobs.c.run_after <= now),\n",
        "",
        ("test_ready.py::TestFiveConditions::test_the_time_has_come",),
    ),
    Breakage(
        "the claim takes leased jobs",
        "ready.py",
        "        or_(jobs.c.lease_expires.is_(None), jobs.c.lease_expires <= now),\n",
        "",
        ("test_ready.py::TestFiveConditions::test_no_live_lease",),
    ),
    Breakage(
        "the scan of lanes begins again each time",
        "ready.py",
        "self._after[lane.queue, lane.type] = lane",
        "self._after[lane.queue, lane.type] = page.lanes[0]",
        ("test_ready.py::TestRotation::test_three_hundred_groups_are_seen_in_turn",),
    ),
    # -- clocks and deadlines -------------------------------------------------------------------
    Breakage(
        "leases expire by the worker's clock",
        "lease.py",
        '"lease_expires": backend.now(ttl),',
        f'"lease_expires": {_NOW} + {_IN},',
        ("test_lease.py::TestClaim::test_expires_by_the_clock_of_the_database",),
    ),
    Breakage(
        "leases are taken back by the worker's clock",
        "lease.py",
        "expired = jobs.c.lease_expires < backend.now()",
        f"expired = jobs.c.lease_expires < {_NOW}",
        ("test_reclaim.py::TestReclaim::test_takes_back_what_ran_out_and_nothing_else",),
    ),
    Breakage(
        "leases are renewed after the job's deadline",
        "heartbeat.py",
        "return not (self.completed or self.run.overdue)",
        "return not self.completed",
        ("test_heartbeat.py::test_does_not_renew_after_the_deadline_of_the_job",),
    ),
    # -- the end of attempts --------------------------------------------------------------------
    Breakage(
        "the result is not written with the state",
        "transition.py",
        '"new_state": end.state,\n        "new_result": end.result,',
        '"new_state": end.state,\n        "new_result": None,',
        ("test_finalize.py::TestEnd::test_of_a_success",),
    ),
    Breakage(
        "one refused outcome spoils its batch",
        "writer.py",
        "return await self._one_by_one(items)",
        "raise",
        ("test_writer.py::TestWriter::test_an_outcome_that_is_refused_spoils_no_other",),
    ),
    Breakage(
        "an interrupted attempt is not given back",
        "outcomes.py",
        "return self.ending not in (Ending.SNOOZED, Ending.INTERRUPTED)",
        "return self.ending not in (Ending.SNOOZED,)",
        (
            "test_finalize.py::TestReturn::test_that_costs_no_attempt",
            "test_serve.py::TestStop::test_gives_back_what_does_not_end_in_time",
        ),
    ),
    Breakage(
        "a thread that goes on loses its lease at shutdown",
        "run.py",
        "if self._thread.bar():  # one that is at work can only be asked",
        "if True:",
        ("test_serve.py::TestStop::test_leaves_its_lease_to_a_thread_that_goes_on",),
    ),
    Breakage(
        "the deadline cancels nothing",
        "run.py",
        "        self.stop(Stop.TIMED_OUT)",
        "        pass",
        ("test_run_cut_short.py::TestTimeout::test_cancels_the_handler",),
        NONE,
        unharmed="test_run_values.py::TestSuccess::test_the_result_as_json",
    ),
    Breakage(
        "a handler that does not end is waited for",
        "run.py",
        "self._call_later(self._grace, partial(self._conclude, task))",
        "self._call_no_more()",
        ("test_run_cut_short.py::TestTimeout::test_waits_only_so_long_for_cleaning_up",),
        NONE,
        unharmed="test_run_values.py::TestSuccess::test_the_result_as_json",
    ),
    Breakage(
        "after an error nothing is a transaction any more",
        "backends/servers.py",
        "connection.invalidate()  # or another transaction would have no beginning",
        "pass",
        ("test_transactions.py::test_a_read_that_failed_leaves_transactions_whole",),
        ("postgresql",),
    ),
    Breakage(
        "an update of many jobs goes through others' rows",
        "backends/mysql_json.py",
        "return statement.prefix_with(by_key, JsonTable(types))",
        "return statement.prefix_with(JsonTable(types))",
        ("test_finalize.py::TestBatch::test_with_one_that_somebody_holds",),
        ("mysql",),
    ),
    Breakage(
        "a handler's own SystemExit ends the worker",
        "run.py",
        "        except BaseException as error:\n            return None, error",
        "        except Exception as error:\n            return None, error",
        ("test_run.py::TestErrors::test_fail_the_attempt_and_nothing_else",),
        NONE,
        unharmed="test_run_values.py::TestSuccess::test_the_result_as_json",
    ),
    Breakage(
        "jobs inherit the context of whoever started the worker",
        "run.py",
        "context=contextvars.Context(),",
        "context=contextvars.copy_context(),",
        ("test_run.py::test_no_job_sees_the_context_of_another_or_of_who_started_it",),
        NONE,
        unharmed="test_run_values.py::TestSuccess::test_the_result_as_json",
    ),
    Breakage(
        "an error made of the shutdown's cancellation costs an attempt",
        "run.py",
        "gave_way = error is not None and not isinstance(error, AttemptEnd)",
        "gave_way = isinstance(error, asyncio.CancelledError)",
        (
            "test_retry_rules.py::TestInTheTables"
            "::test_a_deploy_is_no_attempt_whatever_handlers_make_of_it",
        ),
    ),
    Breakage(
        "rules for retries are not asked",
        "run.py",
        "allowed = isinstance(error, Retry) or rules.allow(error)",
        "allowed = True",
        ("test_retry_rules.py::TestInTheTables::test_rules_end_a_job_at_its_first_attempt",),
    ),
    # -- resources, middleware, events ----------------------------------------------------------
    Breakage(
        "each job opens what is to be opened once",
        "injection.py",
        "kept = self._kept.get(wanted.provider)",
        "kept = None",
        ("test_injection.py::TestServing::test_opens_at_first_use_and_closes_at_the_end",),
    ),
    Breakage(
        "a resource that swallows an error makes a success of it",
        "injection.py",
        "raise raised[0]  # a provider",
        "return None  # a provider",
        ("test_injection.py::TestErrors::test_that_a_resource_swallows_is_an_error_all_the_same",),
        NONE,
        unharmed="test_run_values.py::TestSuccess::test_the_result_as_json",
    ),
    Breakage(
        "middleware is turned inside out",
        "middleware.py",
        "for layer in reversed(layers):",
        "for layer in layers:",
        ("test_middleware.py::TestOneRun::test_the_first_is_outermost",),
        NONE,
        unharmed="test_run_values.py::TestSuccess::test_the_result_as_json",
    ),
    Breakage(
        "an end is told before it is committed",
        "slots.py",
        "        return self._writer.write(finished, partial(self._written, begun, outcome))",
        "        self._emitter.finished(begun.job, outcome, outcome.state, begun.duration)\n"
        "        written = partial(self._written, begun, outcome)\n"
        "        later = asyncio.get_running_loop().call_later\n"
        "        later(0.05, self._writer.write, finished, written)",
        ("test_events.py::test_an_event_is_told_after_the_commit",),
    ),
    Breakage(
        "an enqueue in the caller's transaction is told at once",
        "callers.py",
        "once_committed(caller, connection, partial(committed, result))",
        "committed(result)",
        (
            "test_events.py::TestEnqueued::test_after_the_commit_and_once",
            "test_events.py::TestEnqueued::test_never_after_a_rollback",
        ),
    ),
    Breakage(
        "the release of a savepoint counts as a commit",
        "commits.py",
        "        if not one.transactions:\n",
        "        if True:\n",
        ("test_events.py::TestEnqueued::test_never_after_a_rollback_to_a_savepoint",),
    ),
    # -- reclaiming -----------------------------------------------------------------------------
    Breakage(
        "nothing is reclaimed",
        "tick.py",
        "if chores.expired:",
        "if chores.expired and not chores.expired:",
        ("test_scheduler.py::TestDrain::test_takes_up_what_dead_workers_left",),
    ),
    Breakage(
        "a job that kills its worker is reclaimed for ever",
        "lease.py",
        "if row.max_attempts is not None and row.attempt >= row.max_attempts:",
        "if row.max_attempts is None:",
        ("test_reclaim.py::TestReclaim::test_fails_a_job_whose_attempts_are_used_up",),
    ),
    # -- settling -------------------------------------------------------------------------------
    Breakage(
        "ends whose worker died are never settled",
        "tick.py",
        "if chores.unsettled:",
        "if chores.unsettled and not chores.unsettled:",
        ("test_scheduler.py::TestDrain::test_takes_up_what_dead_workers_left",),
    ),
    Breakage(
        "an end does not leave its job unsettled",
        "transition.py",
        '"new_settled": end.row.id not in neighboured,',
        '"new_settled": True,',
        ("test_settle.py::TestRelease::test_after_the_only_upstream",),
    ),
    Breakage(
        "settling does not lock the upstreams of new jobs",
        "settle.py",
        "    locked = _locked(connection, backend, wanted)\n",
        f"    locked = {_UNLOCKED.format('wanted')}\n",
        (
            "test_settle_races.py::TestOverlappingTransactions"
            "::test_an_edge_is_committed_while_its_upstream_is_being_finished",
        ),
        SERVERS,
    ),
    Breakage(
        "settling does not lock dependants",
        "settle.py",
        "locks.followers = _locked(connection, backend, {follower for _, follower in pairs})",
        f"locks.followers = {_UNLOCKED.format('{follower for _, follower in pairs}')}",
        ("test_settle_races.py::TestOverlappingTransactions::test_two_last_upstreams_settle",),
        SERVERS,
    ),
    Breakage(
        "settling forgets the dependants beyond its bound",
        "settle.py",
        "if len(found) >= FOLLOWERS:",
        "if found is None:",
        ("test_settle.py::TestBeyondOneBatch::test_many_dependants_of_one",),
    ),
    Breakage(
        "rows that cannot be settled now hide those behind them",
        "settle.py",
        "cut_at=candidates[-1] if len(candidates) == limit else None",
        "cut_at=None",
        (
            "test_settle_races.py::TestOverlappingTransactions"
            "::test_many_neighbours_of_a_held_row_hide_no_other",
        ),
        SERVERS,
    ),
    Breakage(
        "settling does not lock parents",
        "settle.py",
        "locks.parents = set(_locked(connection, backend, set(above.values())))",
        "locks.parents = set(above.values())",
        (
            "graphs/test_races.py::TestAChildUnderAClosingContainer"
            "::test_that_is_not_committed_yet_keeps_it_open",
        ),
        SERVERS,
    ),
    Breakage(
        "an enqueue into a container does not hold it open",
        "backends/base.py",
        "query.with_for_update(read=True)",
        "query",
        (
            "graphs/test_races.py::TestAChildUnderAClosingContainer"
            "::test_that_is_not_committed_yet_keeps_it_open",
        ),
        SERVERS,
    ),
    Breakage(
        "settling looks for no circles",
        "settle.py",
        "waiting_for_themselves(connection, backend, sorted(locks.new))",
        "waiting_for_themselves(connection, backend, [])",
        ("graphs/test_races.py::TestTwoHalvesOfACircle::test_are_found_when_they_settle",),
        SERVERS,
    ),
    Breakage(
        "a search for circles reads each place again",
        "cycles.py",
        "unknown = [place for place in places if place not in self._known]",
        "unknown = list(places)",
        (
            "graphs/test_sizes.py::TestStatements"
            "::test_to_look_for_circles_are_as_many_for_one_job_as_for_many",
        ),
    ),
    Breakage(
        "an upstream may be pruned under the caller who has just seen it",
        "backends/postgresql.py",
        "query = query.with_for_update(read=True, key_share=True)\n        wanted",
        "wanted",
        ("graphs/test_pruned_upstream.py::TestAtAnyMoment::test_of_an_enqueue",),
        ("postgresql",),
    ),
    Breakage(
        "the caller looks for upstreams before the file is locked",
        "backends/sqlite.py",
        "if wanted := list(ids):\n            self.begin_writing(connection)",
        "wanted = list(ids)",
        ("graphs/test_pruned_upstream.py::test_comes_too_late_once_somebody_has_asked_for_it",),
        ("sqlite",),
    ),
    Breakage(
        "a dependant goes with its first upstream",
        "settle.py",
        "if not (row.held or row.hopeless",
        "if not (row.hopeless",
        ("test_settle.py::TestRelease::test_after_the_last_upstream",),
    ),
    Breakage(
        "what is in a container that has not opened goes",
        "settle.py",
        "or row.enclosed or",
        "or",
        ("graphs/test_containers.py::TestGate::test_holds_back_what_is_added_before_it_opens",),
    ),
    Breakage(
        "what was to run anyway is cancelled",
        "edges.py",
        'state in FAILURES and edge.on_failure == "cancel"',
        "state in FAILURES",
        ("test_settle.py::TestFailure::test_may_be_run_anyway",),
    ),
    Breakage(
        "a first failure hurries nothing",
        "settle.py",
        "if locks.waiting or any(row.state == State.FAILED for row in locks.ended):",
        "if locks.waiting:",
        ("graphs/test_containers.py::TestFailFast::test_tells_what_runs_and_waits_for_it",),
    ),
    Breakage(
        "cancelling a container leaves what is in it",
        "settle.py",
        "if any(row.cancel_requested for row in locks.opened):",
        "if False:",
        ("graphs/test_cancel.py::TestContainer::test_takes_all_that_is_below_along",),
    ),
    Breakage(
        "a retry locks from below",
        "control.py",
        "for closed in sorted(ended_above(connection, backend, [job_id]).get(job_id, ())):",
        "for closed in ():",
        (
            "graphs/test_races.py::TestRetrying"
            "::test_a_container_and_what_is_in_it_at_once_deadlocks_nobody",
        ),
        SERVERS,
    ),
    Breakage(
        "a retry revives nothing",
        "revival.py",
        "    reopen(connection, backend, revived)\n",
        "",
        ("graphs/test_retry.py::TestRevival::test_of_a_chain",),
    ),
    Breakage(
        "a child is added for a lease that is lost",
        "children.py",
        "if lease not in still_ours(connection, backend, [lease]):",
        "if lease is None:",
        ("graphs/test_children.py::TestLostLease::test_adds_no_child",),
    ),
    Breakage(
        "a slot is free before its end is settled",
        "writer.py",
        "await self._outbox.settle_now(written.unsettled)",
        "self._outbox.left.set()",
        ("test_outbox.py::TestAnEnd::test_is_settled_before_its_slot_is_free",),
    ),
    Breakage(
        "rows that were held wait for the poll",
        "worker.py",
        "if sweep.held:",
        "if False:",
        ("test_outbox.py::TestWhatSomebodyHolds::test_is_settled_soon_after",),
        SERVERS,
    ),
    # -- attempts, cancelling, pauses, pruning --------------------------------------------------
    Breakage(
        "an attempt is written apart from its state",
        "attempts.py",
        "        connection.execute(insert(backend.tables.attempts), rows)",
        "        connection.execute(insert(backend.tables.attempts), rows)\n"
        "        connection.commit()",
        ("test_attempts.py::TestNotKept::test_without_the_state",),
    ),
    Breakage(
        "a reclaim keeps no attempt",
        "lease.py",
        "    keep_attempts(connection, backend, [_lost(item) for item in taken])\n",
        "",
        ("test_attempts.py::TestKept::test_of_lost_workers",),
    ),
    Breakage(
        "a running job hears of its end with the next renewal",
        "tick.py",
        "if chores.cancelling:",
        "if chores.cancelling and not chores.cancelling:",
        ("test_cancel_running.py::TestRunning::test_in_this_process",),
    ),
    Breakage(
        "a request to end reaches a later lease",
        "lease.py",
        "            if (row.lease_owner, row.lease_token) == (lease.owner, lease.token):\n"
        "                found.add(lease)",
        "            if row.lease_owner == lease.owner:\n                found.add(lease)",
        ("test_cancel_running.py::TestRunning::test_asks_nothing_of_a_later_lease",),
    ),
    Breakage(
        "a caller's old snapshot is believed when it cancels",
        "backends/keys.py",
        "return own or connection.get_isolation_level() in",
        "return True or own in",
        ("test_cancel_running.py::test_what_a_caller_cannot_see_is_cancelled_too",),
        SERVERS,
    ),
    Breakage(
        "a pause is only a hint to the scan",
        "ready.py",
        "        not_paused(backend),\n    ]",
        "    ]",
        ("test_pause.py::TestClaim::test_takes_nothing_of_it_until_it_is_resumed",),
    ),
    Breakage(
        "pruning forgets dependants",
        "families.py",
        "for query in (children, _dependants(backend, chunk)):",
        "for query in (children,):",
        ("test_prune.py::TestWhatStays::test_upstreams_of_what_has_not_ended",),
    ),
    Breakage(
        "pruning forgets what a retry is to revive",
        "families.py",
        "return _leading_to(opened, causes) & rows.keys() if opened else set()",
        "return set()",
        ("test_prune.py::TestRetry::test_that_is_not_settled_yet",),
    ),
    Breakage(
        "pruning does not lock what it deletes",
        "families.py",
        "rows = backend.lock_rows(connection, job_ids, columns, *conditions, to_delete=True)",
        "rows = connection.execute(select(*columns).where(jobs.c.id.in_(job_ids), *conditions))",
        ("test_prune.py::TestRetry::test_of_what_somebody_holds",),
        SERVERS,
    ),
    Breakage(
        "pruning takes no notice of a caller's open edge",
        "backends/postgresql.py",
        "        return query.with_for_update(skip_locked=True, of=self.tables.jobs)",
        "        return self.locking(query)",
        ("test_prune.py::TestCallers::test_open_edge_keeps_its_upstream",),
        ("postgresql",),
    ),
    Breakage(
        "pruning believes a caller's old snapshot",
        "prune.py",
        "if not backend.reads_committed(connection):",
        "if False:",
        ("test_prune.py::TestInACallersTransaction::test_at_another_level_is_refused",),
        SERVERS,
    ),
    Breakage(
        "a schedule is removed while it is being added",
        "schedules.py",
        "if len(rows) == len(new):",
        "if True:",
        ("test_schedule_calls.py::TestSaving::test_at_any_moment_of_its_removal",),
        ("postgresql",),
    ),
    Breakage(
        "a retry believes a caller's old snapshot",
        "revival.py",
        "if connection.execute(query).all() != backend.read_current(connection, query):",
        "if False:",
        ("test_retry_snapshots.py::test_of_a_job_that_has_ended_meanwhile",),
        MYSQL,
    ),
    Breakage(
        "cancelling many believes what it read before it had the lock",
        "control_many.py",
        "    backend.begin_writing(connection)\n"
        "    if series.passed:\n"
        "        job_id, *held = series.held\n"
        "        return _cancel_held",
        "    if series.passed:\n        job_id, *held = series.held\n        return _cancel_held",
        (
            "test_cancel_running.py::TestManyAreCancelled::"
            "test_and_told_what_became_of_them_at_any_moment_of_a_claim",
        ),
        ("sqlite",),
    ),
    # -- connections ----------------------------------------------------------------------------
    Breakage(
        "the library's connections are like the application's",
        "backends/servers.py",
        'self.engine.dialect.set_isolation_level(dbapi_connection, "READ COMMITTED")',
        "pass",
        ("test_connections.py::test_read_committed_whatever_the_applications_engine_says",),
        SERVERS,
    ),
    # -- recurring jobs -------------------------------------------------------------------------
    Breakage(
        "a firing does not lock its schedule",
        "schedules.py",
        "connection.execute(backend.locking(due, table)).all()",
        "connection.execute(due).all()",
        ("test_schedules.py::TestFiring::test_once_at_any_moment_of_another_firing",),
        SERVERS,
    ),
    Breakage(
        "a firing neither locks its schedule nor minds that it was moved on",
        "schedules.py",
        "connection.execute(update(table).where(*same).values(values)).rowcount != 1",
        "connection.execute(update(table).where(*same).values(values)).rowcount < -1",
        ("test_schedules.py::TestFiring::test_moved_on_behind_its_lock_fires_nothing",),
    ),
    Breakage(
        "schedules fire by the worker's clock",
        "schedules.py",
        ".where(part, table.c.next_fire <= backend.now())",
        f".where(part, table.c.next_fire <= {_NOW})",
        ("test_schedules.py::TestFiring::test_at_its_time_and_not_before",),
    ),
    Breakage(
        "every firing shifts the phase",
        "cron.py",
        "return self.anchor + step * ((moment - self.anchor) // step + 1)",
        "return moment + step",
        ("test_schedules.py::TestFiring::test_keeps_its_phase",),
    ),
    Breakage(
        "a worker sleeps through the times of schedules",
        "tick.py",
        "pause = min(pause, chores.next_fire)",
        "pass",
        ("test_schedules_served.py::TestServing::test_fires_when_it_is_time",),
    ),
    Breakage(
        "every worker fires what stands in another's code",
        "ready.py",
        "parts = [and_(~schedules.c.declared, schedules.c.next_fire.is_not(None))]",
        "parts = [and_(schedules.c.next_fire.is_not(None))]",
        ("test_schedules_served.py::TestDeclaredInCode::test_fired_by_workers_that_have_it_there",),
    ),
    Breakage(
        "a schedule that the database refuses spoils its batch",
        "firing.py",
        "return any([await self._fire_alone(name) for name in names])",
        "raise",
        (
            "test_schedules_served.py::TestOneWorker"
            "::test_fires_each_by_itself_if_the_database_refuses_them_together",
        ),
    ),
    # -- unique keys ----------------------------------------------------------------------------
    Breakage(
        "the end of a job does not give its key up",
        "transition.py",
        "case((jobs.c.unique_until > backend.now(), jobs.c.unique_held), else_=None),",
        "jobs.c.unique_held,",
        ("test_unique.py::TestScope::test_ends_with_the_job",),
    ),
    Breakage(
        "the end of a job gives its key up before the period is past",
        "transition.py",
        "case((jobs.c.unique_until > backend.now(), jobs.c.unique_held), else_=None),",
        "None,",
        ("test_unique.py::TestScope::test_ends_with_its_period",),
    ),
    Breakage(
        "the start of a job does not give its key up",
        "lease.py",
        "(jobs.c.unique_while == literal_column(",
        "(jobs.c.unique_while != literal_column(",
        ("test_unique.py::TestScope::test_ends_with_the_start",),
    ),
    Breakage(
        "a retry takes a key that another job holds",
        "control.py",
        "if job_id in conflicts:",
        "if job_id in conflicts and not conflicts:",
        ("test_unique.py::TestRunAgain::test_is_refused_while_another_holds_it",),
    ),
    Breakage(
        "a dependant is revived whose key another job holds",
        "revival.py",
        "revived = [job_id for job_id in revived if job_id not in kept]",
        "revived = [job_id for job_id in revived if kept or job_id]",
        ("test_unique.py::TestRunAgain::test_leaves_dependants_cancelled_that_lost_theirs",),
    ),
    Breakage(
        "a job that was started is replaced",
        "holders.py",
        "never_started = row.lease_token == 0 and row.state in NOT_STARTED",
        "never_started = True",
        ("test_unique.py::TestReplace::test_never_changes_a_job_that_was_started",),
    ),
    Breakage(
        "a workflow is replaced by a job",
        "holders.py",
        "return never_started and row.kind == Kind.JOB",
        "return never_started",
        ("test_unique.py::TestReplace::test_never_changes_a_workflow",),
    ),
    Breakage(
        "nobody is locked out of a key",
        "holders.py",
        "        backend.lock_keys(connection, missing)\n",
        "",
        ("test_unique.py::TestAtOnce::test_with_a_transaction_that_commits_or_not",),
        SERVERS,
    ),
    Breakage(
        "a job starts before the caller who was given it has committed",
        "holders.py",
        "kept = backend.keep_holders(connection, leaving, wait=wait) if leaving else set()",
        "kept = set(leaving)",
        (
            "test_unique.py::TestBesideTheStart"
            "::test_an_open_transaction_keeps_it_from_being_started",
        ),
        ("postgresql",),
    ),
    Breakage(
        "an old snapshot is believed",
        "holders.py",
        "            others = _current(connection, backend, others)\n",
        "            others = dict(others)\n",
        ("test_unique.py::TestOldSnapshot::test_after_the_holder",),
        SERVERS,
    ),
    Breakage(
        "a claim waits for what a caller relies on",
        "backends/mysql.py",
        "rows = self.free_to_end(connection, rows_by_id(connection, query, wanted))",
        "rows = rows_by_id(connection, query, wanted)",
        (
            "test_unique.py::TestBesideTheStart"
            "::test_an_open_transaction_keeps_it_from_being_started",
        ),
        MYSQL,
    ),
    # -- limits ---------------------------------------------------------------------------------
    Breakage(
        "a claim does not lock the rows of its limits",
        "permits.py",
        "locking = ordered.with_for_update() if wait else backend.locking(ordered, limits)",
        "locking = ordered",
        ("test_limits.py::TestConcurrency::test_of_two_who_claim_at_once",),
        SERVERS,
    ),
    Breakage(
        "a permit outlives its lease",
        "permits.py",
        "            if row.in_flight:\n",
        "            if True:\n",
        ("test_limits.py::TestConcurrency::test_a_permit_is_over_with_its_lease",),
    ),
    Breakage(
        "a permit is not taken",
        "permits.py",
        "    backend.insert_rows(connection, tables.permits, taken)\n",
        "",
        ("test_limits.py::TestConcurrency::test_no_more_run_than_may",),
    ),
    Breakage(
        "anybody corrects what a job costs",
        "limit_control.py",
        "ours = (jobs.c.lease_owner == lease.owner, jobs.c.lease_token == lease.token)",
        "ours = (jobs.c.id.is_not(None),)",
        ("test_limits.py::TestBudget::test_only_for_whoever_holds_the_lease",),
    ),
    Breakage(
        "keys without room are walked through, PostgreSQL",
        "backends/postgresql.py",
        "        if skipping:\n            group = case(",
        "        if False:\n            group = case(",
        ("test_lane_costs.py::TestWhatIsClosed::test_keys_without_room",),
        backends=("postgresql",),
    ),
    Breakage(
        "keys without room are walked through, SQLite",
        "backends/sqlite.py",
        "        if skipping:\n            group = case(",
        "        if False:\n            group = case(",
        ("test_lane_costs.py::TestWhatIsClosed::test_keys_without_room",),
        backends=("sqlite",),
    ),
    Breakage(
        "keys without room are walked through, MySQL",
        "backends/mysql.py",
        "ranges.append(and_(same, jobs.c.limit_key.not_in(closed)) if closed else same)",
        "ranges.append(same)",
        ("test_lane_costs.py::TestWhatIsClosed::test_keys_without_room",),
        backends=MYSQL,
    ),
    Breakage(
        "MariaDB sorts the backlog",
        "backends/mysql.py",
        "if len(set(v)) == 1}",
        "if not v}",
        ("test_lane_costs.py::TestWhatIsOpen::test_many_groups_a_page_at_a_time",),
        backends=("mariadb",),
    ),
    Breakage(
        "types without room are scanned",
        "ready.py",
        "            and (queue, name) not in skipped.kinds\n",
        "",
        ("test_lane_costs.py::TestWhatIsClosed::test_a_type_without_room",),
    ),
    Breakage(
        "a new limit is not tried again once it has its row",
        "tick.py",
        "if not claim.missing:  # or they were not tried",
        "if True:",
        ("test_many_closed.py::TestWorker::test_starts_what_opens_and_what_is_new",),
        backends=MYSQL,
    ),
    Breakage(
        "workers that wait do not see a changed limit",
        "openings.py",
        "if place[0] in names]:",
        "if place is names]:",
        ("test_limits_hard.py::TestChangedAtRuntime::test_workers_that_wait_see_it",),
    ),
    Breakage(
        "a group that waits loses what it is owed",
        "fairshare.py",
        "min(known, default=self._now)",
        "max(known, default=self._now)",
        ("test_fairshare_simulated.py::TestEqualRunTimes::test_one_to_two_to_five",),
        NONE,
        unharmed="test_fairshare.py::TestAllocation::test_of_nothing_is_nothing",
    ),
    # -- callers and wakes ----------------------------------------------------------------------
    Breakage(
        "enqueue commits the caller's transaction",
        "callers.py",
        "    result = work(connection)\n",
        "    result = work(connection)\n    caller.commit()\n",
        ("test_callers.py::TestAsyncSession::test_rolled_back_was_never_enqueued",),
    ),
    Breakage(
        "an AUTOCOMMIT connection is taken",
        "callers.py",
        'if level == "AUTOCOMMIT" or backend.commits_at_once(connection):',
        "if False:",
        ("test_callers_refused.py::TestRefused::test_a_connection_without_transactions",),
    ),
    Breakage(
        "a full disk is taken for a refusal of the outcome",
        "writer.py",
        "if isinstance(cause, DBAPIError) and not cause.connection_invalidated:",
        "if False:",
        ("test_writer.py::TestWriter::test_a_full_disk_is_no_refusal",),
    ),
    Breakage(
        "a silent line is waited for without end",
        "backends/bounded.py",
        "if not database.remote:",
        "if True:",
        ("test_silent_line.py::test_a_worker_goes_on_over_a_new_one",),
        backends=("postgresql", "mysql", "mariadb"),
    ),
    Breakage(
        "a pool with one connection for all tasks is taken",
        "backends/__init__.py",
        "    _require_shared_pool(engine)\n",
        "",
        ("test_errors.py::TestUrl::test_of_an_engine_with_one_connection_for_all",),
        backends=("postgresql", "mysql", "mariadb"),
    ),
    Breakage(
        "an enqueue notifies no other process",
        "enqueue.py",
        "    backend.notify(connection, TOPIC)\n",
        "",
        (
            "test_wake.py::TestAnIdleScheduler"
            "::test_starts_at_once_what_is_enqueued_by_another_process",
        ),
        ("postgresql",),
    ),
    Breakage(
        "a retry is not waited for",
        "slots.py",
        "self.on_return(outcome.retry_after)",
        "pass",
        ("test_wake.py::TestAnIdleScheduler::test_wakes_a_job_that_snoozed",),
        SERVERS,
    ),
    # -- what handlers write --------------------------------------------------------------------
    Breakage(
        "a checkpoint carries no fence",
        "checkpoints.py",
        "fence_values(lease.row)",
        f"fence_values({_ANYBODY})",
        ("test_checkpoint.py::TestFence::test_of_somebody_else",),
    ),
    Breakage(
        "a checkpoint is not there for the next attempt",
        "lease.py",
        "return Claimed(Lease(job_id, owner, token), *others)",
        "return Claimed(Lease(job_id, owner, token), *others[:-1])",
        ("test_checkpoint.py::TestAlone::test_is_seen_by_the_next_attempt",),
    ),
    Breakage(
        "progress carries no fence",
        "lease.py",
        "{**fence_values(lease.row),",
        f"{{**fence_values({_ANYBODY}),",
        ("test_progress.py::TestFence::test_of_the_write_itself",),
    ),
    Breakage(
        "the last progress is not written",
        "finalize.py",
        "    store_progress(connection, backend, progress)\n",
        "",
        ("test_progress.py::TestInAWorker::test_the_last_one_is_stored_with_the_end",),
    ),
    Breakage(
        "a completion compares no token",
        "completion.py",
        "(row.lease_owner, row.lease_token) != (lease.owner, lease.token)",
        "row.lease_owner != lease.owner",
        ("test_complete.py::TestFence::test_of_somebody_else",),
    ),
    Breakage(
        "a completion is left settled",
        "transition.py",
        "[_end_values(end, ids) for end in ends]",
        "[_end_values(end, set()) for end in ends]",
        ("test_complete.py::TestNeighbours::test_are_told_after_the_commit_by_anybody",),
    ),
    Breakage(
        "a completion sees no children behind its snapshot",
        "completion.py",
        "waits = last.has_children and not backend.reads_fresh(connection)",
        "waits = False",
        ("test_complete.py::TestNeighbours::test_children_are_waited_for",),
        backends=MYSQL,
    ),
    Breakage(
        "a completion is tried with a snapshot",
        "backends/postgresql.py",
        'if level in ("REPEATABLE READ", "SERIALIZABLE"):',
        'if level == "SNAPSHOT":',
        ("test_complete.py::TestTransaction::test_at_each_isolation_level",),
        backends=("postgresql",),
    ),
    Breakage(
        "a process that a handler has forked works on",
        "forks.py",
        "    if os.getpid() == pid:\n        return\n",
        "    return\n",
        (
            "test_hostile_handlers.py::TestFork::test_of_one_on_the_loop",
            "test_hostile_handlers.py::TestFork::test_of_one_in_a_thread",
        ),
    ),
    Breakage(
        "any number of handlers is left behind",
        "slots.py",
        "too_many = max(0, len(self._left_behind) - LEFT_BEHIND)",
        "too_many = 0",
        (
            "test_hostile_handlers.py::"
            "test_only_so_many_are_left_behind_with_their_slots_in_use_again",
        ),
    ),
    Breakage(
        "a process goes on after its job was ended",
        "processes.py",
        """        except BaseException:
            await process.kill()
            raise
        finally:""",
        "        finally:",
        ("test_processes.py::TestDeath::test_comes_with_the_end_of_the_attempt",),
        NONE,
        unharmed="test_processes.py::TestCall::test_is_made_elsewhere_and_there_again",
    ),
    Breakage(
        "a process that holds Python's lock outlives its worker",
        "process_program.py",
        "        _die_with_the_worker()\n",
        "        pass\n",
        ("test_processes.py::TestDeath::test_comes_with_that_of_the_worker",),
        NONE,
        unharmed="test_processes.py::TestCall::test_is_made_elsewhere_and_there_again",
    ),
    Breakage(
        "what a process has started outlives it",
        "processes.py",
        "os.killpg(self._process.pid, signal.SIGKILL)",
        "pass",
        ("test_processes.py::TestDeath::test_comes_with_the_end_of_the_attempt",),
        NONE,
        unharmed="test_processes.py::TestCall::test_is_made_elsewhere_and_there_again",
    ),
    Breakage(
        "leases are renewed on the loop of the handlers",
        "renewing.py",
        "            await self._heartbeat.renew_once(apart)",
        "            raise OSError",
        ("test_blocked_loop.py::test_costs_nobody_a_lease",),
    ),
    Breakage(
        "a claim that is told too late is run",
        "heartbeat.py",
        "if monotonic() >= beat.sure_until:  # the loop stood still while it was claimed",
        "if False:",
        ("test_heartbeat.py::test_a_claim_that_is_told_too_late_starts_nothing",),
    ),
    Breakage(
        "a caller that holds a row costs its job the lease",
        "heartbeat.py",
        "return beat.held_at + 2 * self.step > now",
        "return False",
        ("test_heartbeat.py::test_a_lease_whose_row_somebody_holds_is_not_lost",),
        ("postgresql", "mysql", "mariadb"),
    ),
    Breakage(
        "who queues for the file gives its jobs up",
        "heartbeat.py",
        "if late and (database or self._database).queues:",
        "if False:",
        ("test_held_file.py::test_handlers_of_a_worker_that_queues_go_on",),
        ("sqlite",),
    ),
    Breakage(
        "who had to wait for the file reclaims at once",
        "reclaiming.py",
        "leaves = waited > self._tolerated",
        "leaves = False",
        ("test_held_file.py::TestReclaim::test_lets_others_go_first_who_had_to_wait_too",),
        ("sqlite",),
    ),
    Breakage(
        "a renewal takes a completed job for a lost one",
        "heartbeat.py",
        "        renewal.lost -= await self._completed_among(database, renewal.lost)\n",
        "",
        ("test_complete.py::TestInAWorker::test_goes_on_without_a_lease",),
    ),
    Breakage(
        "an outcome after a completion is a lost lease",
        "finalize.py",
        "doubtful = [item.lease for item in result.lost if item.completing]",
        "doubtful: list[Lease] = []",
        ("test_complete.py::TestOutcome::test_counts_for_nothing",),
    ),
    # -- waiting --------------------------------------------------------------------------------
    Breakage(
        "ends are told to nobody",
        "backends/postgresql.py",
        "if monotonic() < self.awaited_until:",
        "if monotonic() < 0:",
        ("test_results.py::TestWait::test_learns_of_the_end_at_once",),
        backends=("postgresql",),
    ),
    Breakage(
        "nobody says that he waits",
        "backends/listening.py",
        "        await announce(connection)\n",
        "",
        ("test_results.py::TestWait::test_a_worker_tells_of_ends_while_somebody_waits",),
        backends=("postgresql",),
    ),
    # -- checks of the tables -------------------------------------------------------------------
    Breakage(
        "a check takes what settling is about to do for a fault",
        "check_rules.py",
        "over = or_(upstream.c.id.is_(None), and_(ended(upstream), upstream.c.settled))",
        "over = or_(upstream.c.id.is_(None), ended(upstream))",
        ("test_check.py::TestCheck::test_finds_nothing_in_what_is_under_way",),
    ),
    Breakage(
        "a check looks at the first slice alone",
        "check.py",
        "return _Looked(keys, upto)",
        "return _Looked(keys)",
        ("test_check.py::TestCheck::test_looks_at_every_slice",),
    ),
    Breakage(
        "a repair writes to a job that a worker holds",
        "check_repair.py",
        "[row.id for row in rows if not row.in_flight]",
        "[row.id for row in rows]",
        ("test_check.py::TestRepair::test_leaves_a_job_to_the_worker_that_holds_it",),
    ),
    Breakage(
        "a repair gives a unique key to two",
        "check_repair.py",
        "if job_id not in conflicts}",
        "if job_id}",
        ("test_check.py::TestRepair::test_gives_no_key_to_two",),
    ),
    # -- explaining ---------------------------------------------------------------------------
    Breakage(
        "a worker that fell silent is taken for a live one",
        "presence.py",
        "live=silent_for <= row.lost_after,",
        "live=True,",
        ("test_presence.py::TestRow::test_of_one_that_falls_silent",),
    ),
    Breakage(
        "the row of a worker that came back is deleted",
        "presence.py",
        "delete(workers).where(here, _gone(backend))",
        "delete(workers).where(here)",
        ("test_presence.py::TestRow::test_of_one_gone_for_long_is_deleted_unless_it_came_back",),
    ),
    Breakage(
        "a worker that has stopped leaves its row",
        "worker.py",
        "        await self._presence.vanish_once()\n",
        "",
        ("test_presence.py::TestWorker::test_is_there_while_it_serves",),
    ),
    Breakage(
        "an explanation looks at no container around a job",
        "explain.py",
        "above, parent = found.job.parent_id, None",
        "above, parent = None, None",
        ("test_explain.py::TestBlocked::test_by_what_it_is_in",),
    ),
    Breakage(
        "an explanation counts the jobs behind one too",
        "explain.py",
        "same, jobs.c.id < job.id, by_lane",
        "same, jobs.c.id != job.id, by_lane",
        ("test_explain.py::TestReady::test_behind_others_of_its_group",),
    ),
    Breakage(
        "an explanation follows causes in circles",
        "explain.py",
        "cause not in {self.job_id, *found} and",
        "cause not in {*found} and",
        ("test_explain.py::TestEnded::test_whose_cause_is_pruned_or_goes_round",),
    ),
)

"""Prompts of tenants under a rate and budgets: all are answered, and each is paid for once."""

from __future__ import annotations

import os
import re

import pytest

from examples.programs import EXAMPLES, Place

FULL = bool(os.environ.get("ASYNCJOBQ_TEST_FULL"))
DATABASES = ("sqlite", "postgresql", "mysql", "mariadb") if FULL else ("sqlite", "postgresql")


@pytest.mark.parametrize("backend_name", DATABASES, indirect=True)
def test_tenants(place: Place, database_url: str) -> None:
    ran = place.run(str(EXAMPLES / "tenant_prompts.py"), database_url, within=120)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    answers = [line.partition(":")[0] for line in lines[:45]]
    assert (answers.count("acme"), answers.count("zeta")) == (40, 5)
    assert answers[-1] == "acme", "who has few prompts does not wait for who has many"
    got = dict(re.findall(r"(\w+) has \d+ answers for (\S+) tokens", ran.stdout))
    paid = {who: tokens for tokens, who in re.findall(r"paid (\S+) tokens by (\w+)", ran.stdout)}
    assert got == paid
    days = dict(re.findall(r"(\w+) has .* in (\d+) days", ran.stdout))
    assert int(days["acme"]) >= 2, "its budget of one is too small"
    broken = re.search(r"broken down (\d+) times", lines[-1])
    assert broken is not None
    assert broken[1] == "5"
    assert "Traceback" not in ran.stderr
    assert place.left_behind == []

"""A process that asks for jobs with unique keys, in transactions that it commits or not."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from asyncjobq import UniqueConflictError, enqueue

ROLLED_BACK = 0.3
RAISING = 0.2


def run(url: str, seed: int, count: int, keys: int, report: str) -> None:
    """Ask `count` times, each in a transaction, and write what came of it as JSON."""
    told = asyncio.run(_ask_often(url, random.Random(seed), count, keys))
    Path(report).write_text(json.dumps(told))


async def _ask_often(url: str, chance: random.Random, count: int, keys: int) -> dict[str, Any]:
    wait = {"timeout": 60} if url.startswith("sqlite") else {}
    engine = create_async_engine(url, connect_args=wait)
    ends: Counter[str] = Counter()
    ids: dict[str, list[int]] = {"new": [], "existing": []}
    errors: list[str] = []
    for _ in range(count):
        try:
            end, job_id = await _ask(engine, chance, f"key {chance.randrange(keys)}")
        except Exception as error:
            errors.append(repr(error))
            continue
        ends[end] += 1
        if end in ids:
            ids[end].append(job_id)
    await engine.dispose()
    return {"ends": ends, "ids": ids, "errors": errors}


async def _ask(engine: Any, chance: random.Random, key: str) -> tuple[str, int]:
    raises = chance.random() < RAISING
    options: Any = {"on_conflict": "raise"} if raises else {}
    async with AsyncSession(engine) as session:
        try:
            job = await enqueue(session, "work", {"label": key}, unique_key=key, **options)
        except UniqueConflictError as error:
            await session.commit()
            return "conflict", error.job_id or 0
        if chance.random() < ROLLED_BACK:
            await session.rollback()
            return "rolled back", job.id
        await session.commit()
        return ("existing" if job.existing else "new"), job.id

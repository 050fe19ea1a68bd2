"""Prompts of two tenants for a language model whose API is slow, limited, and not free.

    python examples/tenant_prompts.py [URL OF A DATABASE]

The API takes so many requests a second from all of us together, which is a RateLimit; each tenant
has so many tokens a day, which is a Budget of its own. What a prompt will cost is estimated when it
is enqueued, and corrected when the answer says what it was. A tenant with many prompts neither
hides one with few, for they are groups, nor holds up anything when its day's tokens are spent.

The API is a fake one in this process, which refuses what comes too fast, fails now and then, and
charges nobody twice who repeats a request under the same key. A day has three seconds here.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypedDict

from aiohttp import ClientSession, web

from asyncjobq import Budget, Handlers, JobContext, RateLimit, Retry, Scheduler, exponential, inject

REQUESTS: Final = 20
"""A second, of all tenants together."""
TOKENS: Final = 1_500
"""A day, of each tenant."""
DAY: Final = 3.0
ANSWER: Final = 80
"""Tokens that an answer is expected to have."""
PROMPTS: Final = {"acme": 40, "zeta": 5}

handlers = Handlers()


class Answer(TypedDict):
    """What the model said, and what it was paid."""

    text: str
    tokens: int


async def get_model() -> AsyncIterator[ClientSession]:
    """Open the connections to the API, once for all jobs."""
    async with ClientSession(os.environ["MODEL_API"]) as client:
        yield client


@handlers.handler(
    timeout=30,
    max_attempts=8,
    retry=exponential(base=0.2, cap=5),
    limits=[
        RateLimit("model requests", REQUESTS, per=1),
        Budget("model tokens", TOKENS, per=DAY, key="tenant"),
    ],
)
async def ask(
    ctx: JobContext, tenant: str, prompt: str, model: ClientSession = inject(get_model)
) -> Answer:
    """Ask the model, and say what that has cost in truth."""
    asked = {"tenant": tenant, "prompt": prompt}
    # An attempt that was cut off may have been answered, and paid: the key says that it is one.
    key = {"Idempotency-Key": f"prompt {ctx.job_id}"}
    async with model.post("/answers", json=asked, headers=key) as response:
        if response.status == 429:
            raise Retry("too fast", after=float(response.headers["Retry-After"]))
        response.raise_for_status()  # the rest is tried again as the handler says
        answer: Answer = await response.json()
    await ctx.set_cost(answer["tokens"])
    return answer


def estimate(prompt: str) -> int:
    """Return about how many tokens a prompt and its answer have."""
    return len(prompt) // 4 + ANSWER


class FakeModel:
    """An API that answers slowly, and remembers who has asked what."""

    def __init__(self) -> None:
        self.paid: Counter[str] = Counter()
        self.refused = self.broken = 0
        self._answers: dict[str, Answer] = {}
        self._lately: deque[float] = deque()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a prompt, refuse what is too much for a second, and break down at times."""
        now = asyncio.get_running_loop().time()
        while self._lately and now - self._lately[0] >= 1:
            self._lately.popleft()
        if len(self._lately) > REQUESTS + 5:
            self.refused += 1
            return web.Response(status=429, headers={"Retry-After": "0.5"})
        self._lately.append(now)
        key, asked = request.headers["Idempotency-Key"], await request.json()
        if key not in self._answers:
            await asyncio.sleep(0.05)
            tokens = len(asked["prompt"]) // 4 + 40 + len(self._answers) * 13 % 80
            self._answers[key] = {"text": asked["prompt"].upper(), "tokens": tokens}
            self.paid[asked["tenant"]] += tokens
            if len(self._answers) % 9 == 0:
                self.broken += 1
                raise web.HTTPBadGateway  # after the work, and its price: the worst moment
        return web.json_response(self._answers[key])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on a free port, and give the address."""
        app = web.Application()
        app.router.add_post("/answers", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


async def ask_all(url: str) -> None:
    """Ask the prompts of all tenants, and say what has come of it."""
    scheduler = Scheduler(url, handlers=[handlers], concurrency=50, poll_interval=0.2)
    async with scheduler:
        await scheduler.create_schema()
        jobs = [
            ask.job(tenant, prompt).options(group_key=tenant, cost=estimate(prompt))
            for tenant, number in PROMPTS.items()
            for prompt in [f"question {n} of {tenant}, and why?" for n in range(number)]
        ]
        enqueued = await scheduler.enqueue_many(jobs)
        async with scheduler.serving():
            async for job in scheduler.as_completed(enqueued, timeout=120):
                print(f"{job.args['tenant']}: {ask.result_of(job)['text']}", flush=True)
        for tenant in PROMPTS:
            await tell(scheduler, tenant)


async def tell(scheduler: Scheduler, tenant: str) -> None:
    """Print what a tenant has got, and in how many of its days."""
    jobs = await scheduler.find(group_key=tenant, state="done", limit=1000)
    tokens = sum(ask.result_of(job)["tokens"] for job in jobs)
    days = {job.started_at.timestamp() // DAY for job in jobs if job.started_at}
    print(f"{tenant} has {len(jobs)} answers for {tokens:,} tokens, in {len(days)} days.")


async def main(url: str) -> None:
    """Ask the fake model, and compare the bills."""
    model = FakeModel()
    async with model.serving() as address:
        os.environ["MODEL_API"] = address
        await ask_all(url)
    for tenant, tokens in sorted(model.paid.items()):
        print(f"The model was paid {tokens:,} tokens by {tenant}.")
    print(f"It has refused {model.refused} requests and broken down {model.broken} times.")


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        default = f"sqlite+aiosqlite:///{Path(place)}/prompts.db"
        asyncio.run(main(sys.argv[1] if sys.argv[1:] else default))

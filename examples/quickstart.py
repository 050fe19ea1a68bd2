"""An invoice of three items: each is priced by a job, and one that waits for them adds up."""

import asyncio

from asyncjobq import JobContext, Scheduler

scheduler = Scheduler("sqlite+aiosqlite:///quickstart.db")
PRICES = {"tea": 4, "cup": 9, "pot": 32}


@scheduler.handler
async def price(product: str, quantity: int = 1) -> int:
    return PRICES[product] * quantity


@scheduler.handler
async def add_up(ctx: JobContext, customer: str) -> str:
    return f"{customer} owes {sum(job.result for job in await ctx.upstreams())} euros."


async def main() -> None:
    await scheduler.create_schema()
    async with scheduler.serving():
        prices = [price.job("tea", quantity=3), price.job("cup", quantity=2), price.job("pot")]
        invoice = add_up.job("Ada").options(depends_on=await scheduler.enqueue_many(prices))
        print(await scheduler.wait(await scheduler.enqueue(invoice)))


asyncio.run(main())

"""An application whose tests are tested: a scheduler that nobody can reach, and its handlers."""

from __future__ import annotations

from asyncjobq import Fail, Handlers, JobContext, Scheduler, Snooze, constant

handlers = Handlers()


@handlers.handler
async def invoice(ctx: JobContext, product: str, quantity: int = 1) -> str:
    """Have a mail sent; some products make it end otherwise."""
    if product == "broken":
        raise ValueError("no price")
    if product == "unknown":
        raise Fail("there is no such product")
    if product == "late":
        raise Snooze(after=60)
    await ctx.enqueue(mail.job("Ada"))
    return f"{quantity} {product}"


@handlers.handler(queue="mails")
async def mail(to: str) -> str:
    """Have a queue of its own."""
    return f"to {to}"


@handlers.handler(retry=constant(30), max_attempts=3)
async def flaky(ctx: JobContext) -> int:
    """Succeed at the third attempt."""
    if ctx.attempt < 3:
        raise OSError(f"attempt {ctx.attempt}")
    return ctx.attempt


@handlers.handler
def plain(ctx: JobContext, text: str) -> str:
    """Run in a thread."""
    ctx.progress(1, 2)
    return text.upper()


@handlers.handler
async def parts(ctx: JobContext, number: int) -> int:
    """Wait for children."""
    for part in range(number):
        await ctx.add_child(mail.job(str(part)), key=str(part))
    return number


def make_scheduler() -> Scheduler:
    """Return a new application's scheduler."""
    url = "postgresql+asyncpg://nobody@127.0.0.1:9/production"
    return Scheduler(url, handlers=[handlers], queues=("default", "mails"))

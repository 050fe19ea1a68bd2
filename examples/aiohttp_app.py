"""Invitations by mail, to each address once, with aiohttp.

An invitation and the job that sends it are committed together: an address that is refused gets no
mail, and one that is accepted gets it although the server is killed at once.

    python examples/aiohttp_app.py
    curl -d '{"email": "ada@example.org"}' http://127.0.0.1:8080/invitations
    curl http://127.0.0.1:8080/invitations/ada@example.org

The database is DATABASE_URL, or else the file invitations.db in the current directory; PORT is
another port than 8080.
"""

import os
from collections.abc import AsyncIterator

from aiohttp import web
from sqlalchemy import BigInteger, String
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from asyncjobq import JobContext, Scheduler

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///invitations.db"))
scheduler = Scheduler(engine)


class Base(DeclarativeBase):
    """The application's own tables."""


class Invitation(Base):
    __tablename__ = "invitations"

    email: Mapped[str] = mapped_column(String(200), primary_key=True)
    job_id: Mapped[int] = mapped_column(BigInteger)


@scheduler.handler(timeout=30)
async def send_invitation(ctx: JobContext, email: str) -> str:
    """Send the mail. A second attempt repeats the message's id, by which it can be recognised."""
    message_id = f"<invitation-{ctx.job_id}@example.org>"
    print(f"To: {email}\nMessage-ID: {message_id}\n\nPlease come.", flush=True)
    return message_id


async def run_jobs(app: web.Application) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await scheduler.create_schema()
    async with scheduler, scheduler.serving():
        yield
    await engine.dispose()


async def invite(request: web.Request) -> web.Response:
    email = (await request.json())["email"]
    try:
        async with AsyncSession(engine) as session, session.begin():
            job = await scheduler.enqueue(send_invitation.job(email), session=session)
            session.add(Invitation(email=email, job_id=job.id))
    except IntegrityError:  # rolled back, and the job with it
        raise web.HTTPConflict(text=f"{email} is invited already.") from None
    return web.json_response({"email": email, "job": job.id}, status=201)


async def read_invitation(request: web.Request) -> web.Response:
    email = request.match_info["email"]
    async with AsyncSession(engine) as session:
        invitation = await session.get(Invitation, email)
    if invitation is None:
        raise web.HTTPNotFound(text=f"{email} is not invited.")
    job = await scheduler.get(invitation.job_id)
    return web.json_response({"email": email, "state": job.state, "message_id": job.result})


def make_app() -> web.Application:
    app = web.Application()
    app.cleanup_ctx.append(run_jobs)
    app.router.add_post("/invitations", invite)
    app.router.add_get("/invitations/{email}", read_invitation)
    return app


if __name__ == "__main__":
    web.run_app(make_app(), host="127.0.0.1", port=int(os.environ.get("PORT", "8080")))

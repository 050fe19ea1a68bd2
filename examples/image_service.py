"""Uploads and their thumbnails, with FastAPI and Pillow: polled, or followed as they come.

    pip install 'asyncjobq[examples]'
    python examples/image_service.py
    curl --data-binary @photo.jpg http://127.0.0.1:8000/images
    curl -N http://127.0.0.1:8000/images/1/events
    curl http://127.0.0.1:8000/images/1
    curl -O http://127.0.0.1:8000/images/1/320.jpg

An image, its row and the workflow of its jobs are there together or not at all. Thumbnails are made
in processes: a picture that is made to fill the memory, or to decode for ever, ends one of these,
and neither the service nor its neighbours. The database is DATABASE_URL, or else the file images.db
in the current directory; IMAGES is another folder for the files than images, PORT another port than
8000.
"""

import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypedDict

import anyio
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, StreamingResponse
from PIL import Image as Picture
from PIL import UnidentifiedImageError
from sqlalchemy import BigInteger, String
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from asyncjobq import JobContext, Scheduler

FOLDER: Final = Path(os.environ.get("IMAGES", "images"))
WIDTHS: Final = (160, 320, 1280)
MOST_BYTES: Final = 20_000_000
KEEP_ALIVE: Final = 15
"""Seconds after which a stream of events says that it is still there, for proxies to believe it."""

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///images.db"))
# As many pictures at a time as there are cores; the other queue is for what waits for others.
scheduler = Scheduler(engine, queues={"default": 10, "cpu": os.cpu_count() or 1})


class Base(DeclarativeBase):
    """The service's own tables."""


class Image(Base):
    __tablename__ = "images"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(40))
    workflow: Mapped[int | None] = mapped_column(BigInteger)
    published: Mapped[bool] = mapped_column(default=False)


class Thumbnail(TypedDict):
    width: int
    height: int


@scheduler.handler(
    queue="cpu",
    run_in="process",
    timeout=30,
    fail_on=(UnidentifiedImageError, Picture.DecompressionBombError),  # no better a second time
)
def make_thumbnail(name: str, width: int) -> Thumbnail:
    """Make one thumbnail; made again, it takes the place of the first."""
    with Picture.open(FOLDER / name) as picture:
        picture.thumbnail((width, width * 4))
        unfinished = FOLDER / f"{name}.{width}.{secrets.token_hex(4)}"
        picture.convert("RGB").save(unfinished, "JPEG", quality=85)
    unfinished.replace(thumbnail_of(name, width))
    return {"width": picture.width, "height": picture.height}


@scheduler.handler
async def publish(ctx: JobContext, image_id: int) -> list[Thumbnail]:
    """Publish an image with its thumbnails, at the very commit that makes this job done."""
    made = [make_thumbnail.result_of(job) for job in await ctx.upstreams()]
    async with ctx.session() as session, session.begin():
        image = await session.get_one(Image, image_id)
        image.published = True
        await session.flush()
        await ctx.complete(session, made)
    return made


def thumbnail_of(name: str, width: int) -> Path:
    return FOLDER / f"{name}.{width}.jpg"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    await anyio.Path(FOLDER).mkdir(exist_ok=True)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await scheduler.create_schema()
    async with scheduler, scheduler.serving():
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/images", status_code=201)
async def upload(request: Request) -> dict[str, int]:
    """Take an image as the body of the request."""
    name = secrets.token_hex(16)
    try:
        async with await anyio.open_file(FOLDER / name, "wb") as file:
            async for chunk in bounded(request.stream()):
                await file.write(chunk)
        return {"image": await register(name)}
    except BaseException:  # whatever it was: a client that went away in the middle, for one
        await anyio.Path(FOLDER / name).unlink(missing_ok=True)
        raise


async def bounded(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass chunks on until they are too many."""
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > MOST_BYTES:
            raise HTTPException(413, f"An image has {MOST_BYTES:,} bytes at most.")
        yield chunk


async def register(name: str) -> int:
    """Write the row of a new image and the workflow of its jobs, and return its id."""
    async with AsyncSession(engine) as session, session.begin():
        image = Image(name=name)
        session.add(image)
        await session.flush()
        async with scheduler.workflow(f"image {image.id}", session=session) as workflow:
            made = [workflow.add(make_thumbnail.job(name, width)) for width in WIDTHS]
            workflow.add(publish.job(image.id), depends_on=made)
        image.workflow = workflow.id
        return image.id


@app.get("/images/{image_id}")
async def read_image(image_id: int) -> dict[str, Any]:
    """Say how far an image is."""
    image, workflow = await found(image_id)
    (*made, published) = await scheduler.find(parent=workflow)
    failed = [await scheduler.attempts(job) for job in made if job.state == "failed"]
    return {
        "published": image.published,
        "state": (await scheduler.get(workflow)).state,
        "thumbnails": published.result,
        # A job's own error has the whole traceback, which is nothing for strangers.
        "errors": sorted({f"{last.error_type}: {last.message}" for (*_, last) in failed}),
    }


@app.get("/images/{image_id}/events")
async def follow_image(image_id: int) -> StreamingResponse:
    """Tell of each job of an image as it ends, as server-sent events."""
    _, workflow = await found(image_id)
    jobs = await scheduler.find(parent=workflow)
    return StreamingResponse(told({job.id for job in jobs}), media_type="text/event-stream")


async def told(left: set[int]) -> AsyncIterator[str]:
    """Yield an event for the end of each job, and a comment where nothing happens for long."""
    while left:
        try:
            async for job in scheduler.as_completed(list(left), timeout=KEEP_ALIVE):
                left.discard(job.id)
                data = json.dumps({"state": job.state, "result": job.result})
                yield f"event: {job.type}\ndata: {data}\n\n"
        except TimeoutError:
            yield ": still at it\n\n"


@app.get("/images/{image_id}/{width}.jpg")
async def read_thumbnail(image_id: int, width: int) -> FileResponse:
    """Give a thumbnail of an image that is published."""
    image, _ = await found(image_id)
    if not image.published or width not in WIDTHS:
        raise HTTPException(404, f"There is no such thumbnail of image {image_id}.")
    return FileResponse(thumbnail_of(image.name, width))


async def found(image_id: int) -> tuple[Image, int]:
    """Return an image, and the workflow of its jobs."""
    async with AsyncSession(engine) as session:
        image = await session.get(Image, image_id)
    if image is None or image.workflow is None:
        raise HTTPException(404, f"There is no image {image_id}.")
    return image, image.workflow


if __name__ == "__main__":
    # A stream that is being followed does not keep the service from stopping for long.
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=3)

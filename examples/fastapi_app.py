"""A shop whose orders and the jobs that invoice them are committed together, with FastAPI.

    python examples/fastapi_app.py
    curl -d '{"product": "tea", "quantity": 2}' -H 'content-type: application/json' \
        http://127.0.0.1:8000/orders
    curl http://127.0.0.1:8000/orders/1

The database is DATABASE_URL, or else the file shop.db in the current directory; PORT is another
port than 8000.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypedDict

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, PositiveInt
from sqlalchemy import BigInteger, String
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from asyncjobq import JobContext, Scheduler

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///shop.db"))
scheduler = Scheduler(engine)


class Base(DeclarativeBase):
    """The shop's own tables."""


class Product(Base):
    __tablename__ = "products"

    name: Mapped[str] = mapped_column(String(50), primary_key=True)
    cents: Mapped[int]
    stock: Mapped[int]


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    product: Mapped[str] = mapped_column(String(50))
    quantity: Mapped[int]
    invoice_job: Mapped[int | None] = mapped_column(BigInteger)


class NewOrder(BaseModel):
    product: str
    quantity: PositiveInt = 1


class Invoice(TypedDict):
    number: str
    cents: int


@scheduler.handler
async def write_invoice(ctx: JobContext, order_id: int) -> Invoice:
    """Write the invoice of an order; its number comes from the order, so twice is the same."""
    async with ctx.session() as session:
        order = await session.get_one(Order, order_id)
        product = await session.get_one(Product, order.product)
    return {"number": f"2026-{order_id:05}", "cents": product.cents * order.quantity}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session, session.begin():
        await session.merge(Product(name="tea", cents=450, stock=20))
    await scheduler.create_schema()
    async with scheduler, scheduler.serving():
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place_order(wanted: NewOrder) -> dict[str, int]:
    async with AsyncSession(engine) as session, session.begin():
        order = Order(product=wanted.product, quantity=wanted.quantity)
        session.add(order)
        await session.flush()
        job = await scheduler.enqueue(write_invoice.job(order.id), session=session)
        order.invoice_job = job.id
        await take_from_stock(session, wanted)  # if this raises, there is no order and no job
        return {"order": order.id, "job": job.id}


async def take_from_stock(session: AsyncSession, wanted: NewOrder) -> None:
    product = await session.get(Product, wanted.product, with_for_update=True)
    if product is None or product.stock < wanted.quantity:
        raise HTTPException(409, f"There are not {wanted.quantity} of {wanted.product}.")
    product.stock -= wanted.quantity


@app.get("/orders/{order_id}")
async def read_order(order_id: int) -> dict[str, Any]:
    async with AsyncSession(engine) as session:
        order = await session.get(Order, order_id)
    if order is None or order.invoice_job is None:
        raise HTTPException(404, f"There is no order {order_id}.")
    job = await scheduler.get(order.invoice_job)
    return {
        "product": order.product,
        "quantity": order.quantity,
        "state": job.state,
        "invoice": job.result,
    }


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))

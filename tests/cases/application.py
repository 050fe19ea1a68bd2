"""A table of the application's own, beside the library's."""

from __future__ import annotations

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Application(DeclarativeBase):
    """Registry of the application's tables."""


class Order(Application):
    """A row that a job is about."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]

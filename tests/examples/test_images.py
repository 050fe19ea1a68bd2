"""The image service over real HTTP: pictures that are uploaded, polled, followed and fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import Image

from examples.programs import Place
from examples.web import Web, serving

WIDTHS = [160, 320, 1280]


@pytest.fixture
def service(place: Place) -> Iterator[Web]:
    """Give the service, with its files outside of the current directory."""
    with serving(place, "image_service.py", IMAGES=str(place.folder / "images")) as web:
        yield web


def picture(width: int, height: int) -> bytes:
    """Return a picture with an alpha channel, which JPEG has none for."""
    file = BytesIO()
    Image.new("RGBA", (width, height), (200, 30, 30, 128)).save(file, "PNG")
    return file.getvalue()


def events(client: httpx.Client, path: str) -> list[tuple[str, Any]]:
    """Follow a stream of server-sent events to its end."""
    with client.stream("GET", path, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    return list(
        zip(names, [json.loads(line.removeprefix("data: ")) for line in lines[1::2]], strict=True)
    )


def test_images(service: Web, place: Place) -> None:
    client = service.client
    uploaded = client.post("/images", content=picture(2000, 1000))
    assert (uploaded.status_code, uploaded.json()) == (201, {"image": 1})
    told = events(client, "/images/1/events")
    assert [name for name, _ in told] == ["make_thumbnail"] * 3 + ["publish"]
    assert {data["state"] for _, data in told} == {"done"}
    image = client.get("/images/1").json()
    sizes = [(160, 80), (320, 160), (1280, 640)]
    assert image["thumbnails"] == [{"width": w, "height": h} for w, h in sizes]
    assert (image["published"], image["state"], image["errors"]) == (True, "done", [])
    for size in sizes:
        thumbnail = client.get(f"/images/1/{size[0]}.jpg")
        assert thumbnail.headers["content-type"] == "image/jpeg"
        assert Image.open(BytesIO(thumbnail.content)).size == size
    assert client.get("/images/1/99.jpg").status_code == 404
    assert events(client, "/images/1/events") != [], "also for who comes late"
    assert len(list((place.folder / "images").iterdir())) == 4

    assert client.post("/images", content=b"no picture").json() == {"image": 2}
    told = events(client, "/images/2/events")
    assert {(name, data["state"]) for name, data in told} == {
        ("make_thumbnail", "failed"),
        ("publish", "cancelled"),
    }
    refused = client.get("/images/2").json()
    assert (refused["published"], refused["state"]) == (False, "failed")
    (error,) = refused["errors"]
    assert error.startswith("UnidentifiedImageError: cannot identify image file")
    assert client.get("/images/2/160.jpg").status_code == 404
    assert client.get("/images/3").status_code == 404
    assert service.count("images") == 2
    service.interrupt()
    assert place.left_behind == []


def test_too_large_an_upload_leaves_nothing(service: Web, place: Place) -> None:
    refused = service.client.post("/images", content=b"x" * 20_000_001)
    assert refused.status_code == 413
    assert list((place.folder / "images").iterdir()) == []
    assert service.count("images") == service.count("jobs") == 0

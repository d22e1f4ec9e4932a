"""POST /v1/images/classify with real pictures through the real pixels code."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import httpx
import pytest
from PIL import Image

from edgerun.errors import EngineLost, QueueFull
from edgerun.server.pictures import MAX_PICTURES

from .fakes import FakeEngine, FakeRepository
from .harness import Running, running

PATH = "/v1/images/classify"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


def png(color: str, size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def form(*pictures: bytes) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("file", ("x.bin", data, "application/octet-stream")) for data in pictures]


def best(row: dict[str, object]) -> str:
    return str(row["predictions"][0]["label"])  # type: ignore[index]


@pytest.mark.parametrize("color", ["red", "lime", "blue"])
@pytest.mark.parametrize("way", ["form", "raw", "octets", "json"])
def test_a_color_is_called_by_its_name_whichever_way_it_comes(server: Running, color: str, way: str) -> None:
    data = png(color)
    client = server.client
    if way == "form":
        response = client.post(PATH, files=form(data), data={"model": "rgb", "top_k": "2"})
    elif way == "json":
        response = client.post(PATH, json={"file": data_uri(data), "model": "rgb", "top_k": 2})
    else:
        kind = "image/png" if way == "raw" else "application/octet-stream"
        params = {"model": "rgb", "top_k": 2}
        response = client.post(PATH, content=data, headers={"content-type": kind}, params=params)
    answer = response.json()
    assert (answer["model"], answer["version"], answer["provider"]) == ("rgb", 3, "CPUExecutionProvider")
    (row,) = answer["data"]
    assert row["index"] == 0
    assert best(row) == ("green" if color == "lime" else color)
    assert len(row["predictions"]) == 2
    assert set(row["predictions"][0]) == {"label", "index", "score"}
    assert set(row["timing_ms"]) == {"preprocess", "queue", "infer", "total"}


def test_without_a_name_the_classifier_is_used(server: Running) -> None:
    assert server.client.post(PATH, files=form(png("red"))).json()["model"] == "rgb"


def test_many_pictures_keep_their_order_and_a_bad_one_spoils_only_itself(server: Running) -> None:
    pictures = [png("red"), b"", png("blue", (1, 1)), png("lime", (2000, 1)), png("blue")[:30]]
    rows = server.client.post(PATH, files=form(*pictures)).json()["data"]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert [best(rows[i]) for i in (0, 2, 3)] == ["red", "blue", "green"]
    for bad in (rows[1], rows[4]):
        assert set(bad) == {"index", "error"}
        assert isinstance(bad["error"], str)
        assert bad["error"]


def test_json_takes_a_list_and_a_broken_data_uri_is_one_bad_row(server: Running) -> None:
    uris = [data_uri(png("blue")), "data:image/png;base64,@@@@", "data:image/png,plain"]
    rows = server.client.post(PATH, json={"images": uris}).json()["data"]
    assert best(rows[0]) == "blue"
    assert "base64" in rows[1]["error"]
    assert "base64" in rows[2]["error"]


@pytest.mark.parametrize("data", [b"", b"hello, no picture", b"<svg></svg>", png("red")[:20]])
def test_all_bad_is_a_clean_400(server: Running, data: bytes) -> None:
    response = server.client.post(PATH, files=form(data, data))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_image"


def test_the_content_counts_not_the_declared_type(server: Running) -> None:
    response = server.client.post(PATH, content=png("red"), headers={"content-type": "image/jpeg"})
    assert best(response.json()["data"][0]) == "red"


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1/x.png", "https://x.example/x", "file:///etc/passwd", "x"]
)
def test_addresses_are_not_fetched(server: Running, address: str) -> None:
    response = server.client.post(PATH, json={"image": address})
    assert response.status_code == 400
    assert "not fetched" in response.json()["error"]["message"]


@pytest.mark.parametrize("top_k", ["0", "-1", "many", "1.5", ""])
def test_top_k_must_be_a_positive_number(server: Running, top_k: str) -> None:
    response = server.client.post(PATH, files=form(png("red")), data={"top_k": top_k})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_k"


def test_top_k_beyond_the_classes_gives_all(server: Running) -> None:
    response = server.client.post(PATH, files=form(png("red")), data={"top_k": "500"})
    assert len(response.json()["data"][0]["predictions"]) == 3


@pytest.mark.parametrize(
    "request_fields",
    [
        {"json": {}},
        {"json": []},
        {"json": {"file": 5}},
        {"json": {"image": data_uri(png("red")), "threshold": 1}},
        {"json": {"image": data_uri(png("red")), "model": 5}},
        {"content": b"{", "headers": {"content-type": "application/json"}},
        {"data": {"model": "rgb"}, "files": [("picture", ("x", b"x", "image/png"))]},
        {"data": {"file": "text"}, "files": form(png("red"))},
        {"files": form(png("red")), "params": {}, "data": {"size": "5"}},
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"x", "headers": {"content-type": "image/png"}, "params": {"size": "5"}},
    ],
)
def test_malformed_requests_are_refused(server: Running, request_fields: dict[str, object]) -> None:
    response = server.client.post(PATH, **request_fields)  # type: ignore[arg-type]
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_another_content_type_is_a_415(server: Running) -> None:
    response = server.client.post(PATH, content=b"x", headers={"content-type": "text/plain"})
    assert response.status_code == 415


def test_too_many_pictures_are_refused(server: Running) -> None:
    for num in (MAX_PICTURES + 1, MAX_PICTURES + 5):
        response = server.client.post(PATH, files=form(*[b"x"] * num))
        assert response.status_code == 400


def test_a_language_model_cannot_classify(server: Running) -> None:
    response = server.client.post(PATH, files=form(png("red")), data={"model": "parrot"})
    assert "/v1/chat/completions" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status"), [(EngineLost("gone"), 503), (QueueFull("full", retry_after_s=1), 429)]
)
def test_an_engine_that_fails_every_picture_gives_its_status(error: Exception, status: int) -> None:
    with running(FakeEngine(error_on_infer=error)) as server:  # type: ignore[arg-type]
        assert server.client.post(PATH, files=form(png("red"), png("blue"))).status_code == status


def test_crowds_get_what_each_gets_alone(server: Running) -> None:
    colors = ["red", "lime", "blue"] * 5
    alone = {color: httpx.post(server.url + PATH, files=form(png(color))).json() for color in set(colors)}
    rows = server.client.post(PATH, files=form(*map(png, colors))).json()["data"]
    for color, row in zip(colors, rows, strict=True):
        assert row["predictions"] == alone[color]["data"][0]["predictions"]


def test_no_vision_model_is_said_so() -> None:
    repository = FakeRepository()
    del repository.specs["rgb"]
    with running(repository=repository) as server:
        response = server.client.post(PATH, files=form(png("red")))
    assert response.status_code == 400
    assert "vision model" in response.json()["error"]["message"]

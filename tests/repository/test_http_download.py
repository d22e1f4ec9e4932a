"""http_download: resumes, retries what can pass, and refuses what is not the file."""

from __future__ import annotations

import errno
import resource
import signal
from pathlib import Path

import pytest

from edgerun.errors import PullFailed
from edgerun.repository.files import no_progress
from edgerun.repository.http_download import HttpDownload, http_stream

from .host import Host, serving

DATA = bytes(range(256)) * 2000


def download(host: Host, partial: Path, *, size: int = len(DATA), can_resume: bool = True) -> bool:
    return HttpDownload(host.url, partial, size, can_resume).run(http_stream, no_progress, lambda _: None)


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    return tmp_path / "1" / "m.gguf.partial"


def test_whole_file_arrives_with_progress(partial: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with serving(Host(DATA)) as host:
        HttpDownload(host.url, partial, 0, True).run(http_stream, lambda *step: seen.append(step))
    assert partial.read_bytes() == DATA
    assert seen[-1] == ("download", len(DATA), len(DATA))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_partial_file_is_continued_not_fetched_again(partial: Path) -> None:
    partial.parent.mkdir()
    partial.write_bytes(DATA[:1000])
    with serving(Host(DATA)) as host:
        assert download(host, partial) is True
    assert host.requests == [("/m.gguf", "bytes=1000-")]
    assert partial.read_bytes() == DATA


def test_cut_connections_are_continued(partial: Path) -> None:
    with serving(Host(DATA, cuts=5)) as host:  # more than the tries in a row: each gets further
        assert download(host, partial) is False
    assert partial.read_bytes() == DATA
    assert len(host.requests) == 6


def test_host_without_ranges_starts_again(partial: Path) -> None:
    partial.parent.mkdir()
    partial.write_bytes(b"x" * 1000)
    with serving(Host(DATA, has_ranges=False)) as host:
        assert download(host, partial) is False
    assert partial.read_bytes() == DATA


def test_without_a_hash_nothing_is_continued(partial: Path) -> None:
    partial.parent.mkdir()
    partial.write_bytes(b"x" * 1000)
    with serving(Host(DATA)) as host:
        download(host, partial, can_resume=False)
    assert host.requests[0][1] == ""
    assert partial.read_bytes() == DATA


def test_overlong_partial_and_416_start_again(partial: Path) -> None:
    partial.parent.mkdir()
    partial.write_bytes(b"x" * (len(DATA) + 5))
    with serving(Host(DATA)) as host:
        download(host, partial)
        assert partial.read_bytes() == DATA
        partial.write_bytes(b"x" * (len(DATA) + 5))
        download(host, partial, size=0)  # not known here that it is too long: the host answers 416
    assert partial.read_bytes() == DATA


def test_server_errors_are_tried_again(partial: Path) -> None:
    with serving(Host(DATA, errors=2)) as host:
        download(host, partial)
    assert partial.read_bytes() == DATA


def test_a_connection_that_never_gets_further_ends(partial: Path) -> None:
    with serving(Host(DATA, cuts=100, has_ranges=False)) as host, pytest.raises(PullFailed, match=host.url):
        download(host, partial)
    assert len(host.requests) <= 4
    assert partial.stat().st_size > 0  # kept


@pytest.mark.parametrize(
    ("host", "word"),
    [
        (Host(DATA, status=404), "404"),
        (Host(DATA, status=403), "403"),
        (Host(DATA, errors=99), "500"),
        (Host(DATA, body=b"<html>sign in</html>"), "HTML page"),
        (Host(DATA, body=b"<p>hello</p>", content_type="text/html; charset=utf-8"), "web page"),
        (Host(DATA, body=DATA[:-1]), str(len(DATA) - 1)),
        (Host(DATA + b"x", has_length=False), "more than"),
    ],
)
def test_what_is_not_the_file_is_refused(partial: Path, host: Host, word: str) -> None:
    with serving(host), pytest.raises(PullFailed, match=word) as caught:
        download(host, partial)
    assert "\n" not in caught.value.message
    assert "is_local" not in caught.value.details


def test_no_connection_is_one_line(partial: Path) -> None:
    with serving(Host(DATA)) as host:
        url = host.url
    with pytest.raises(PullFailed, match=url) as caught:
        download(Host(DATA, url=url), partial)
    assert "\n" not in caught.value.message


def test_interrupt_keeps_what_arrived(partial: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with serving(Host(DATA)) as host:
        with pytest.raises(KeyboardInterrupt):
            HttpDownload(host.url, partial, len(DATA), True).run(http_stream, interrupt)
        kept = partial.stat().st_size
        assert 0 < kept < len(DATA)
        assert download(host, partial) is True
    assert host.requests[-1][1] == f"bytes={kept}-"
    assert partial.read_bytes() == DATA


def test_full_disk_is_one_line_and_local(partial: Path) -> None:
    """A limit on the size of files stands in for a full disk: the write fails in the same place."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN  # Python's default, which we rely on
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with serving(Host(DATA)) as host, pytest.raises(PullFailed, match="make room") as caught:
            download(host, partial)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.details["is_local"] is True
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    with serving(Host(DATA)) as host:
        assert download(host, partial) is True  # what arrived is used
    assert partial.read_bytes() == DATA


def test_too_little_room_is_refused_before_fetching(partial: Path) -> None:
    huge = 1 << 60
    with serving(Host(DATA, has_length=False)) as host, pytest.raises(PullFailed, match="are free"):
        download(host, partial, size=huge)
    assert not partial.exists()

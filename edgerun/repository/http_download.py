"""Fetches one file over HTTP into a partial file: resumes, retries, and refuses what is not the file.

Does not know what the file is for, nor whether its hash is right: the caller checks and gives the final name.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from edgerun.errors import PullFailed
from edgerun.repository.files import Progress, check_free_space, disk_errors
from edgerun.repository.sniff import HEAD_BYTES, describe_wrong_bytes

logger = logging.getLogger(__name__)

MAX_TRIES = 3  # in a row without getting further; a long download over a bad line may go on for more
_TIMEOUT = httpx.Timeout(30.0, connect=15.0)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")

Stream = Callable[[str, Mapping[str, str]], AbstractContextManager[httpx.Response]]
"""(url, headers) -> an open streaming GET."""


def http_stream(url: str, headers: Mapping[str, str]) -> AbstractContextManager[httpx.Response]:
    """A streaming GET that follows redirects (httpx drops credentials when the host changes)."""
    return httpx.stream("GET", url, headers=dict(headers), timeout=_TIMEOUT, follow_redirects=True)


@dataclass(frozen=True, slots=True)
class HttpDownload:
    """One file to fetch. size_bytes 0: not known.

    can_resume: whether a partial file of before may be continued. Only where a hash is checked afterwards:
    nothing else tells that the two halves belong together.
    """

    url: str
    partial: Path
    size_bytes: int
    can_resume: bool
    headers: Mapping[str, str] = field(default_factory=dict)

    def run(self, stream: Stream, progress: Progress, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Fetch until the partial file is whole. Returns whether bytes of an earlier run are in it.

        Raises PullFailed; what arrived stays for the next run where can_resume allows it.
        """
        if not self.can_resume:
            self.partial.unlink(missing_ok=True)
        start_bytes = best_bytes = self._have()
        tries = 0
        while True:
            try:
                kept = self._once(stream, progress)
            except _Retry as error:
                tries = 0 if self._have() > best_bytes else tries + 1
                best_bytes = max(best_bytes, self._have())
                if tries >= MAX_TRIES:
                    raise PullFailed(str(error), url=self.url) from error
                logger.info("%s; trying again", error)
                sleep(0.5 * 2**tries)
            else:
                return start_bytes > 0 and kept

    def _have(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def _once(self, stream: Stream, progress: Progress) -> bool:
        """One request. Returns whether it continued the partial file rather than beginning anew."""
        have = self._have()
        if self.size_bytes and have > self.size_bytes:
            self.partial.unlink()
            have = 0
        if self.size_bytes and have == self.size_bytes:
            return True
        headers = {"Accept-Encoding": "identity", **self.headers}
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            with stream(self.url, headers) as response:
                return self._receive(response, have, progress)
        except (httpx.TransportError, httpx.TooManyRedirects) as error:
            raise _Retry(f"{self.url}: {str(error) or type(error).__name__}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PullFailed(f"{self.url}: {error}", url=self.url) from error

    def _receive(self, response: httpx.Response, have: int, progress: Progress) -> bool:
        status = response.status_code
        if status == 416:  # the server has no bytes beyond ours: ours are not of this file
            self.partial.unlink(missing_ok=True)
            raise _Retry(f"{self.url} has nothing beyond the {have} bytes that are here (416)")
        if status >= 500 or status in (408, 425, 429):
            raise _Retry(f"{self.url} answered {status} {response.reason_phrase}")
        if status not in (200, 206):
            raise PullFailed(f"{self.url} answered {status} {response.reason_phrase}", url=self.url)
        content_range = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if status == 206 and (content_range is None or int(content_range[1]) != have):
            self.partial.unlink(missing_ok=True)
            raise _Retry(f"{self.url} sent another range than was asked for")
        if status == 200:
            have = 0
        total = self._check_total(response, have)
        with disk_errors(self.partial):
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            check_free_space(self.partial.parent, total - have)
        self._write(response, have, total, progress)
        if total and self._have() != total:
            raise _Retry(f"{self.url} sent {self._have()} bytes of {total} and then closed")
        return status == 206

    def _check_total(self, response: httpx.Response, have: int) -> int:
        """Bytes of the whole file; 0 where neither side knows."""
        length = response.headers.get("content-length", "")
        total = have + int(length) if length.isdigit() else 0
        if response.headers.get("content-type", "").startswith("text/html"):
            raise PullFailed(f"{self.url} answered with a web page, not the file", url=self.url)
        # A few bytes are rather an error page: looking into them tells more than their number.
        if self.size_bytes and total > HEAD_BYTES and total != self.size_bytes:
            raise PullFailed(
                f"{self.url} has {total} bytes where config.toml says {self.size_bytes}",
                url=self.url,
            )
        return total or self.size_bytes

    def _write(self, response: httpx.Response, have: int, total: int, progress: Progress) -> None:
        # The context closes the file on an interrupt too: what arrived is on the disk and can be continued.
        with disk_errors(self.partial), self.partial.open("ab" if have else "wb") as file:
            # No chunk size: that would hold bytes back until it is filled, and lose them on an interrupt.
            for chunk in response.iter_bytes():
                if file.tell() == 0 and (wrong := describe_wrong_bytes(chunk[:HEAD_BYTES])):
                    raise PullFailed(f"what {self.url} sent {wrong}", url=self.url)
                if total and file.tell() + len(chunk) > total:
                    raise PullFailed(
                        f"{self.url} sends more than the {total} bytes of the file", url=self.url
                    )
                file.write(chunk)
                progress("download", file.tell(), total)


class _Retry(Exception):
    """It may work the next time."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from edgerun import log


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger("edgerun")
    before = (root.handlers[:], root.level, ours.level)
    stream = io.StringIO()
    log.setup("info", stream)
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_a_record_is_one_line_with_time_level_and_request(stream: io.StringIO) -> None:
    with log.request_id("req-1"):
        logging.getLogger("edgerun.server").info("got %s", "a\nb")
    logging.getLogger("edgerun.server").info("after")
    first, second = stream.getvalue().splitlines()
    assert first[:4].isdigit()
    assert first.endswith(" INFO    req-1 edgerun.server: got a\\nb")
    assert second.endswith(" INFO    - edgerun.server: after")


def test_level_is_for_edgerun_and_others_are_heard_from_warning_on(stream: io.StringIO) -> None:
    logging.getLogger("edgerun.llm").debug("a step")
    logging.getLogger("httpx").info("a request")
    logging.getLogger("httpx").warning("a problem")
    assert [line.rsplit(": ")[-1] for line in stream.getvalue().splitlines()] == ["a problem"]


def test_setup_again_does_not_double_the_lines(stream: io.StringIO) -> None:
    log.setup("debug", stream)
    logging.getLogger("edgerun").debug("once")
    assert stream.getvalue().count("once") == 1


def test_exception_is_logged_with_its_traceback(stream: io.StringIO) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("edgerun").exception("failed")
    assert stream.getvalue().endswith("ValueError: why\n")

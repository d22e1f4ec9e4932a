from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.text.detokenizer import Detokenizer


def oracle(data: bytes, stops: list[str]) -> tuple[str, bool]:
    """The whole text, cut where the stop string that is complete first begins."""
    text = data.decode("utf-8", errors="replace")
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def stream(pieces: list[bytes], stops: list[str]) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(pieces, stops)
    shown = [detokenizer.push([token_id]) for token_id in range(len(pieces))]
    return [*shown, detokenizer.finish()], detokenizer


raw_pieces = st.lists(st.binary(max_size=5), max_size=12)
text = st.text(alphabet="ab é🙂", max_size=20)
stops_of_few_letters = st.lists(st.text(alphabet="ab é🙂\ufffd", max_size=4), max_size=4)


@given(pieces=raw_pieces, stops=st.lists(st.text(alphabet="a\x00\ufffd", max_size=3), max_size=2))
def test_any_bytes_give_what_decoding_the_whole_gives(pieces: list[bytes], stops: list[str]) -> None:
    shown, detokenizer = stream(pieces, stops)
    assert ("".join(shown), detokenizer.stopped) == oracle(b"".join(pieces), stops)


@given(text=text, stops=stops_of_few_letters, data=st.data())
def test_cuts_between_tokens_do_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    shown, detokenizer = stream(pieces, stops)
    assert ("".join(shown), detokenizer.stopped) == oracle(raw, stops)

    at_once = Detokenizer(pieces, stops)
    assert at_once.push(range(len(pieces))) + at_once.finish() == "".join(shown)
    assert (at_once.stopped, at_once.num_tokens) == (detokenizer.stopped, detokenizer.num_tokens)


@given(text=text, stops=stops_of_few_letters)
def test_holds_back_no_more_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer([character.encode() for character in text], stops)
    shown = ""
    for index in range(len(text)):
        shown += detokenizer.push([index])
        if detokenizer.stopped:
            break
        held = text[len(shown) : index + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_bytes_of_an_unfinished_character_are_held() -> None:
    shown, _ = stream([b"a", b"\xf0\x9f", b"\x99", b"\x82b"], [])
    assert shown == ["a", "", "", "🙂b", ""]


def test_invalid_bytes_become_replacement_marks_once_certain() -> None:
    shown, _ = stream([b"\xf0\x9f", b"x", b"\xff", b"\xe2\x82"], [])
    assert shown == ["", "\ufffdx", "\ufffd", "", "\ufffd"]


def test_stop_that_spans_tokens_is_never_shown() -> None:
    shown, detokenizer = stream([b"one S", b"TO", b"P two", b"more"], ["STOP"])
    assert shown == ["one ", "", "", "", ""]
    assert detokenizer.stopped
    assert detokenizer.num_tokens == 3


def test_text_that_only_began_like_a_stop_is_shown() -> None:
    shown, detokenizer = stream([b"ST", b"OR", b"E S"], ["STOP"])
    assert shown == ["", "STOR", "E ", "S"]
    assert not detokenizer.stopped
    assert detokenizer.num_tokens == 3


def test_the_stop_that_is_complete_first_wins() -> None:
    shown, _ = stream([b"abcdef"], ["abcdef", "cd"])
    assert "".join(shown) == "ab"


@pytest.mark.parametrize("stops", [[], [""]])
def test_empty_stop_ends_nothing(stops: list[str]) -> None:
    shown, detokenizer = stream([b"a", b"", b"b"], stops)
    assert "".join(shown) == "ab"
    assert not detokenizer.stopped


def test_control_tokens_give_nothing_and_count() -> None:
    detokenizer = Detokenizer([b"", b"x"])
    assert detokenizer.push([0, 1, 0]) == "x"
    assert detokenizer.num_tokens == 3


def test_nothing_comes_after_a_stop() -> None:
    detokenizer = Detokenizer([b"a|", b"b"], ["|"])
    assert [detokenizer.push([0]), detokenizer.push([1]), detokenizer.finish()] == ["a", "", ""]
    assert detokenizer.num_tokens == 1


def test_finish_twice_gives_the_rest_once() -> None:
    detokenizer = Detokenizer([b"S"], ["STOP"])
    detokenizer.push([0])
    assert [detokenizer.finish(), detokenizer.finish()] == ["S", ""]

"""Keeps a user's text from turning into control tokens while a template works on it.

A template mixes its own marks (`<|im_end|>`) with the users' words in one string. Before it runs, `cover`
replaces the first character of each special text in those words by a private stand-in that occurs nowhere
in them, so that any special text in the rendered string was written by the template. `split` cuts the
string there and puts the users' characters back. The words keep their length and everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from edgerun.errors import InvalidRequest
from edgerun.text.prompt import Segment

# Unicode's private use areas: no meaning anywhere, no white space, no upper or lower case.
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class Shield:
    """For one set of special texts."""

    def __init__(self, special_texts: Iterable[str], *, reserved: str = "") -> None:
        """reserved: text whose characters cannot be stand-ins (the template's source)."""
        texts = sorted({text for text in special_texts if text}, key=len, reverse=True)  # longest first
        alternatives = "|".join(map(re.escape, texts)) or r"(?!)"  # (?!) matches nothing
        self._special = re.compile(alternatives)
        self._special_at = re.compile(f"(?={alternatives})")  # also those that overlap
        self._openers = frozenset(text[0] for text in texts)
        self._proper_prefixes = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._max_prefix = max((len(text) - 1 for text in texts), default=0)
        self._reserved = frozenset(reserved).union(*texts)

    def cover(self, value: object) -> Shielded:
        """A copy of nested lists and mappings with no special text in any string of it."""
        used = self._reserved.union(*_strings(value))
        free = (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in used)
        stand_ins = dict(zip(sorted(self._openers), free, strict=False))
        if len(stand_ins) < len(self._openers):
            raise InvalidRequest(
                "the messages use every private-use character of Unicode; remove some", param="messages"
            )
        return Shielded(
            value=self._cover(value, stand_ins),
            special=self._special,
            originals=str.maketrans({stand_in: opener for opener, stand_in in stand_ins.items()}),
        )

    def _cover(self, value: object, stand_ins: Mapping[str, str]) -> object:
        if isinstance(value, str):
            return _replace(value, self._whole(value) | self._begun(value), stand_ins)
        if isinstance(value, Mapping):
            # Keys are names that the template looks up, so an unfinished special text may stay in them.
            return {
                _replace(key, self._whole(key), stand_ins): self._cover(item, stand_ins)
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self._cover(item, stand_ins) for item in value]
        return value

    def _whole(self, text: str) -> set[int]:
        """Where special texts start."""
        if not self._special.search(text):  # the fast and usual case
            return set()
        return {found.start() for found in self._special_at.finditer(text)}

    def _begun(self, text: str) -> set[int]:
        """Where a special text starts that whatever follows `text` could complete.

        Templates that put two messages side by side, or trim them, would complete it.
        """
        starts = set()
        for end in {len(text), len(text.rstrip())}:
            for start in range(max(0, end - self._max_prefix), end):
                if text[start:end] in self._proper_prefixes:
                    starts.add(start)
        return starts


@dataclass(frozen=True, slots=True)
class Shielded:
    """What the template gets (`value`), and how to read what it made of it."""

    value: Any
    special: re.Pattern[str]
    originals: dict[int, str]

    def split(self, rendered: str) -> tuple[Segment, ...]:
        """The rendered text cut at the special texts in it, stand-ins put back; no segment is empty."""
        segments: list[Segment] = []
        done = 0
        for found in self.special.finditer(rendered):
            if found.start() > done:
                segments.append(self._plain(rendered[done : found.start()]))
            segments.append(Segment(found.group(), special=True))
            done = found.end()
        if done < len(rendered):
            segments.append(self._plain(rendered[done:]))
        return tuple(segments)

    def _plain(self, text: str) -> Segment:
        return Segment(text.translate(self.originals), special=False)


def _replace(text: str, positions: set[int], stand_ins: Mapping[str, str]) -> str:
    if not positions:
        return text
    characters = list(text)
    for position in positions:
        characters[position] = stand_ins[characters[position]]
    return "".join(characters)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from _strings(item)

"""Token ids to text that is safe to show now.

Holds back the bytes of an unfinished UTF-8 character and any text that could still become a stop string.
However the tokens cut the bytes, the joined output is the same. No native code: `pieces` came over from
the engine when the model was loaded.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence


class Detokenizer:
    """The text of one answer, token by token. Constant time for each character."""

    def __init__(self, pieces: Sequence[bytes], stop: Sequence[str] = ()) -> None:
        """pieces[i]: the bytes of token i, b"" for control tokens. Empty stop strings are ignored."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        stops = [text for text in stop if text]
        self._matcher = _StopMatcher(stops) if stops else None
        self._held = ""  # the beginning of a stop string, perhaps
        self.stopped = False  # a stop string is complete; the text ended just before it
        self.num_tokens = 0  # consumed, up to and including the one that completed the stop string

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; the text that is now certain. "" once stopped."""
        shown: list[str] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            shown.append(self._show(self._decoder.decode(self._pieces[token_id])))
        return "".join(shown)

    def finish(self) -> str:
        """No more tokens come: the rest that was held back. An unfinished character becomes U+FFFD."""
        if self.stopped:
            return ""
        shown = self._show(self._decoder.decode(b"", final=True))
        if not self.stopped:
            shown += self._held
        self._held = ""
        return shown

    def _show(self, new: str) -> str:
        if self._matcher is None:
            return new
        text = self._held + new
        match = self._matcher.feed(new)
        if match is not None:
            end_in_new, num_chars = match
            self.stopped = True
            end = len(self._held) + end_in_new - num_chars
            self._held = ""
            return text[:end]
        keep = len(text) - self._matcher.num_pending
        self._held = text[keep:]
        return text[:keep]


class _StopMatcher:
    """Aho and Corasick's automaton (CACM 18(6), 1975): all stop strings at once, one step a character.

    A node is a prefix of a stop string; the current node is the longest that the text so far ends with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest = [0]  # length of the longest stop string that the node ends with, 0 for none
        for text in stops:
            self._insert(text)
        self._fallback = [0] * len(self._depth)  # the longest proper suffix that is a node too
        self._link()
        self._node = 0

    def _insert(self, text: str) -> None:
        node = 0
        for character in text:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._depth)
                self._children[node][character] = child
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._longest.append(0)
            node = child
        self._longest[node] = len(text)

    def _link(self) -> None:
        queue = deque(self._children[0].values())
        while queue:  # by depth, so that a node's fallback is complete before it is needed
            node = queue.popleft()
            for character, child in self._children[node].items():
                queue.append(child)
                self._fallback[child] = self._step(self._fallback[node], character)
                self._longest[child] = self._longest[child] or self._longest[self._fallback[child]]

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(character, 0)

    def feed(self, text: str) -> tuple[int, int] | None:
        """(end in `text`, length) of the stop string that is complete first; the longest if two are."""
        for index, character in enumerate(text):
            self._node = self._step(self._node, character)
            if self._longest[self._node]:
                return index + 1, self._longest[self._node]
        return None

    @property
    def num_pending(self) -> int:
        """Characters at the end of the text that could still become a stop string."""
        return self._depth[self._node]

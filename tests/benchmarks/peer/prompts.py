"""The chats of each row, made of words that are one token each in most vocabularies.

So a text of N words has about N tokens; what a server counted is in its `usage`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.benchmarks.peer.load import Chat

_WORDS = (
    *("river", "stone", "market", "window", "engine", "garden", "paper", "silver", "winter", "doctor"),
    *("signal", "bridge", "music", "number", "valley", "copper", "letter", "season", "farmer", "planet"),
    *("ticket", "harbor", "mirror", "forest"),
)
_TEMPLATE_TOKENS = 30  # about what a chat template and the question around the words take
INTRUDER = "intruder"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and counts of the rows. The defaults are those of the published table."""

    num_streams: int = 16
    context: int = 500
    answer: int = 64
    one_answer: int = 200
    burst_answer: int = 32
    num_watching: int = 8
    watching_answers: tuple[int, ...] = (200, 64)
    intruder: int = 4000
    num_crowded: int = 32
    crowded_prompt: int = 600
    crowded_answer: int = 100
    crowded_cells: int = 8192
    num_tenth: int = 200

    @classmethod
    def tiny(cls) -> Sizes:
        """Proves that the script works, nothing else."""
        return cls(
            num_streams=4,
            context=60,
            answer=8,
            one_answer=20,
            burst_answer=6,
            num_watching=3,
            watching_answers=(60,),
            intruder=600,
            num_crowded=6,
            crowded_prompt=150,
            crowded_answer=16,
            crowded_cells=512,
            num_tenth=20,
        )


def words(seed: str, num_words: int) -> str:
    """The same words for the same seed, on every machine."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(_WORDS) for _ in range(num_words))


def question(seed: str) -> str:
    return f"Tell a story about {words(seed, 6)}."


def unshared(seed: str, count: int, num_prompt_tokens: int, max_tokens: int) -> list[Chat]:
    """Chats that have no prefix in common; each prompt has about num_prompt_tokens."""
    num_words = max(1, num_prompt_tokens - _TEMPLATE_TOKENS)
    return [Chat(words(f"{seed} {i}", num_words), question(f"{seed} {i}"), max_tokens) for i in range(count)]


def shared(seed: str, count: int, num_system_tokens: int, max_tokens: int) -> list[Chat]:
    """Chats with one system prompt and a question of their own each."""
    system = words(seed, num_system_tokens)
    return [Chat(system, question(f"{seed} {i}"), max_tokens) for i in range(count)]


def watching(seed: str, count: int, max_tokens: int) -> list[Chat]:
    """Short chats, to see what another request does to their streams."""
    return [Chat(words(f"{seed} {i}", 8), question(f"{seed} {i}"), max_tokens) for i in range(count)]


def intruder(seed: str, num_prompt_tokens: int) -> Chat:
    """A long prompt that comes when the others stream."""
    system = words(f"{seed} long", num_prompt_tokens - _TEMPLATE_TOKENS)
    return Chat(system, question(seed), 8, tag=INTRUDER, start_after_s=1.5)


def mixed(seed: str, count: int) -> list[Chat]:
    """Short chats, shared prefixes, long ones, some whose client leaves, answers of 8 to 64 tokens.

    The same sizes in the same order whatever the seed; only the words differ.
    """
    chats = []
    shape = random.Random("shape")
    for i in range(count):
        own, max_tokens = f"{seed} {i}", shape.randint(8, 64)
        system = {
            0: words(f"{seed} a", 300),  # two prefixes, each used by a fifth
            1: words(f"{seed} b", 150),
            2: words(own, 350),
        }.get(i % 5, words(own, shape.randint(5, 60)))
        chats.append(Chat(system, question(own), max_tokens, leave_after=4 if i % 10 == 9 else 0))
    return chats

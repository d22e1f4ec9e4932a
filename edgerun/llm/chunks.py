"""Where a prompt may be cut, so that the same prompt gives the same logits however it was cut. Pure Python.

llama.cpp's CPU kernels fall in classes by the number of tokens of a call; within a class the split changes no
bit of the logits, between classes it does (SmolLM2-135M, 512 tokens: greatest difference 0.0 against 0.4 to
0.8). Without flash attention and each sequence in its own stream: one token against several. With flash
attention: fewer than 64 against 64 or more. So the body of a prompt is cut into pieces of at least
`min_chunk`, and a short tail is always a piece of its own: with flash attention up to a block, else its last
token, which then rides with the decodes of others whether the rest was computed or found in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 16
_KERNEL_ROWS = 4  # ggml's repacked kernels take so many tokens at a time


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """min_chunk: fewest tokens of a piece of the body. tail_block: the tail begins at the last multiple of
    this before the prompt's end."""

    min_chunk: int
    tail_block: int

    @classmethod
    def of(cls, *, flash_attention: bool) -> ChunkRule:
        return cls(64, BLOCK) if flash_attention else cls(2, 1)

    def body_end(self, num_tokens: int) -> int:
        """Where the tail of a prompt of num_tokens begins."""
        return (num_tokens - 1) // self.tail_block * self.tail_block

    def long_body(self, num_tokens: int) -> int:
        """Leading tokens that take the kernels of long pieces here and in any prompt that goes on from it."""
        end = self.body_end(num_tokens)
        return end if end >= self.min_chunk else 0

    def reusable(self, num_found: int, num_tokens: int) -> int:
        """How many of num_found leading tokens may be reused so that the rest falls in the same classes as
        in a cold run; 0 .. num_tokens - 1."""
        end = self.body_end(num_tokens)
        num_found = min(num_found, end)
        if num_found == end or end < self.min_chunk:  # no body is left, or it is short anyway
            return num_found
        longest = (end - self.min_chunk) // self.tail_block * self.tail_block
        return min(num_found, longest)

    def size(self, start: int, num_tokens: int, room: int, *, most: int = 0) -> int:
        """Tokens of the next piece of tokens[:num_tokens] from start on, at most `room`; 0: none fits.

        most: rather the smallest allowed piece than none, if it is not over this.
        """
        end = self.body_end(num_tokens)
        left = end - start if start < end else num_tokens - start
        if left <= room:
            return left
        is_body = self.min_chunk <= end
        least = self.min_chunk if is_body and start < end else 1
        if left < 2 * least:  # cutting would leave a piece of the other class
            return min(left, most)
        smallest = -(-max(least, BLOCK) // BLOCK) * BLOCK
        # Without a class to keep, small pieces fill the time better than whole blocks.
        unit = BLOCK if self.tail_block > 1 else _KERNEL_ROWS
        size = (start + room) // unit * unit - start
        if size < (smallest if unit == BLOCK else least):
            size = min(smallest, most, left)
        return left - least if size > 0 and 0 < left - size < least else size

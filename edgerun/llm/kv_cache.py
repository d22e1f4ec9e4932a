"""The paged KV cache: which sequence id holds which tokens, what is kept after the end, what gives way.

Pure Python; owned by the engine thread. Everything done here is also noted as a KvOperation, which the runner
replays on llama.cpp before the step computes. One accounting for both layouts: in the unified pool a prefix
is shared by giving its cells a second sequence id; with separate streams it is copied into the other one.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from edgerun.llm.block_pool import BlockPool
from edgerun.llm.chunks import ChunkRule
from edgerun.llm.prefix_cache import KvSlot, PrefixCache
from edgerun.llm.request import SeqId
from edgerun.llm.sequence import Sequence, SwappedCells
from edgerun.llm.step import Copy, Exchange, KvOperation, Remove, SwapDrop, SwapIn, SwapOut

MissReason = Literal["none", "new", "evicted", "short", "off"]
_MAX_COMPARED_SLOTS = 16
# Moving 500 tokens to another stream takes about as long as one more pass over the weights.
_TOKENS_MOVED_PER_PASS = 500
_MAX_MOVED = 2048  # tokens; a step must not become much longer by it


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """num_seq_ids: sequence ids of the context that may hold something, running or parked.

    exact: only what a cold run computes the same way is reused, so that a hit equals a miss bit for bit.
    """

    layout: Literal["unified", "streams"]
    num_blocks: int
    num_seq_ids: int
    rule: ChunkRule
    block_size: int = 16
    prefix_cache: bool = True
    exact: bool = False
    swap_tokens: int = 0  # how many tokens of preempted sequences host memory may take


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the cache has for a sequence. awaited: a running slot that will have awaited_tokens of it."""

    num_tokens: int
    source: KvSlot | None
    awaited: KvSlot | None
    awaited_tokens: int
    miss: MissReason

    @property
    def should_wait(self) -> bool:
        """Whoever computes the rest of the prefix is still at it."""
        slot = self.awaited
        return slot is not None and slot.is_running and slot.num_tokens < self.awaited_tokens


class KvCache:
    """Owns the slots, the blocks and the tree of prefixes."""

    def __init__(self, config: KvCacheConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self._prefixes = PrefixCache(config.block_size)
        self._free_ids = [SeqId(i) for i in range(config.num_seq_ids)]  # a heap: low ids first
        self._running: dict[KvSlot, None] = {}
        self._parked: OrderedDict[KvSlot, None] = OrderedDict()  # least recently used first
        self._operations: list[KvOperation] = []
        self._swapped: dict[int, int] = {}  # key -> tokens
        self._next_key = 0
        self.num_queried_tokens = self.num_hit_tokens = 0
        self.misses: Counter[str] = Counter()

    # ---- finding and taking

    def lookup(self, sequence: Sequence) -> Lookup:
        """What of the sequence's tokens is here and may be reused; at least one is left to compute."""
        if not self.config.prefix_cache or not sequence.uses_cache:
            return Lookup(0, None, None, 0, "off")
        rule, is_exact = self.config.rule, self.config.exact
        num_tokens = sequence.num_prompt_tokens if is_exact else sequence.num_tokens
        limit = rule.long_body(num_tokens) if is_exact else rule.reusable(num_tokens, num_tokens)
        if sequence.swapped is not None:
            limit = min(limit, sequence.swapped.start)
        if limit < self.config.block_size:
            return Lookup(0, None, None, 0, "short")
        match = self._prefixes.match(sequence.tokens, limit)
        source, found = self._best_source(match.slots, sequence.tokens, match.num_blocks, limit)
        if sequence.swapped is None:
            found = rule.reusable(found, num_tokens)
        if match.num_blocks == limit // self.config.block_size:
            miss: MissReason = "none"
        else:
            miss = "evicted" if match.was_evicted else "new"
        return Lookup(found, source if found else None, match.awaited, match.awaited_tokens, miss)

    def _best_source(
        self, slots: Collection[KvSlot], tokens: list[int], num_blocks: int, limit: int
    ) -> tuple[KvSlot | None, int]:
        """The slot with the longest common prefix; to the token in streams, whole blocks in the pool."""
        if not num_blocks:
            return None, 0
        start = num_blocks * self.config.block_size
        if self.config.layout == "unified":
            return next(iter(slots)), start
        best, best_end = None, -1
        for slot in list(slots)[-_MAX_COMPARED_SLOTS:]:
            last = min(limit, slot.num_reusable, start + self.config.block_size)
            pairs = zip(tokens[start:last], slot.tokens[start:last], strict=True)
            end = start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if end > best_end:
                best, best_end = slot, end
        return best, best_end

    def can_admit(self, lookup: Lookup, num_tokens: int, spare_blocks: int) -> bool:
        """Whether a sequence id and room for num_tokens can be had, leaving spare_blocks to the others."""
        if not self._free_ids and not self._parked:
            return False
        shared = self._shared_blocks(lookup)
        parked_source = lookup.source is not None and not lookup.source.is_running
        # A parked source's blocks are reclaimable until they are taken over: do not count them twice.
        taken = shared if parked_source and self.config.layout == "unified" else 0
        needed = self.pool.blocks_for(num_tokens) - (shared if self.config.layout == "unified" else 0)
        return self.pool.num_available - taken - needed >= spare_blocks

    def _shared_blocks(self, lookup: Lookup) -> int:
        return lookup.num_tokens // self.config.block_size if lookup.source is not None else 0

    def admit(self, sequence: Sequence, lookup: Lookup) -> None:
        """Give the sequence a slot that starts with what the lookup found. See can_admit."""
        source, num_tokens = lookup.source, lookup.num_tokens
        if source is None:
            slot = self._new_slot(sequence)
        elif self._takes_over(source, num_tokens):
            slot = self._take_over(source, sequence, num_tokens)
        else:
            slot = self._new_slot(sequence)
            self._operations.append(Copy(source.seq_id, slot.seq_id, num_tokens))
            if self.config.layout == "unified":
                slot.block_table = self.pool.share(source.block_table[: self._shared_blocks(lookup)])
            else:
                grown = self._grow(slot, num_tokens)
                assert grown, "a stream always has room for what another stream holds"
            if not source.is_running:
                self._parked.move_to_end(source)
        slot.num_tokens = num_tokens
        slot.num_reusable = num_tokens
        sequence.slot = slot
        self._prefixes.hold(slot, num_tokens)
        if sequence.swapped is not None:
            self._swap_in(sequence, slot)
        elif self.config.prefix_cache and sequence.uses_cache:
            self._prefixes.announce(slot, self._prompt_to_reuse(sequence))
        if not sequence.was_admitted:
            self._count(sequence, lookup)

    def _count(self, sequence: Sequence, lookup: Lookup) -> None:
        sequence.was_admitted = True
        sequence.num_cached = lookup.num_tokens
        self.num_queried_tokens += sequence.num_prompt_tokens
        self.num_hit_tokens += lookup.num_tokens
        if lookup.miss != "none":
            self.misses[lookup.miss] += 1

    def _takes_over(self, source: KvSlot, num_tokens: int) -> bool:
        """Continue in the parked slot itself: when nothing is lost by it, or when no other id is free."""
        if source.is_running:
            return False
        loses_nothing = source.num_reusable - num_tokens < self.config.block_size
        return loses_nothing or not self._free_ids

    def _take_over(self, slot: KvSlot, sequence: Sequence, num_tokens: int) -> KvSlot:
        del self._parked[slot]
        self.pool.unpark(slot.block_table)
        self._prefixes.drop(slot, num_tokens // self.config.block_size)
        self.pool.release(slot.block_table, self.pool.blocks_for(num_tokens))
        if slot.num_tokens > num_tokens:
            self._operations.append(Remove(slot.seq_id, num_tokens))
        slot.tokens, slot.is_running = sequence.tokens, True
        self._running[slot] = None
        return slot

    def _new_slot(self, sequence: Sequence) -> KvSlot:
        if not self._free_ids:
            self._evict(next(iter(self._parked)))  # not a source: without a free id that is taken over
        slot = KvSlot(heapq.heappop(self._free_ids), sequence.tokens)
        self._running[slot] = None
        return slot

    # ---- growing

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for the tokens it has now."""
        assert sequence.slot is not None, "only a running sequence grows"
        return max(0, self.pool.blocks_for(sequence.num_tokens) - len(sequence.slot.block_table))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for the sequence's first num_tokens, from parked slots if need be; False: there is none."""
        assert sequence.slot is not None, "only a running sequence grows"
        return self._grow(sequence.slot, num_tokens)

    def _grow(self, slot: KvSlot, num_tokens: int) -> bool:
        needed = self.pool.blocks_for(num_tokens) - len(slot.block_table)
        if needed > self.pool.num_available:
            return False
        if needed > self.pool.num_free:
            self._reclaim(needed)
        return self.pool.grow(slot.block_table, num_tokens)

    def _reclaim(self, num_blocks: int) -> None:
        """Free num_blocks blocks: parked slots give way, least recently used first, each from its tail."""
        while self.pool.num_free < num_blocks:
            slot = next(iter(self._parked))
            keep = len(slot.block_table)
            lacking = num_blocks - self.pool.num_free
            while keep and lacking > 0:
                keep -= 1
                lacking -= self.pool.num_holders(slot.block_table[keep]) == 1
            self._cut(slot, keep)

    def _cut(self, slot: KvSlot, keep: int) -> None:
        """A parked slot keeps its first blocks only; none: it goes, and its id is free."""
        if keep == 0:
            self._evict(slot)
            return
        self._prefixes.drop(slot, keep)
        self.pool.release(slot.block_table, keep, parked=True)
        slot.num_tokens = min(slot.num_tokens, keep * self.config.block_size)
        slot.num_reusable = min(slot.num_reusable, slot.num_tokens)
        self._operations.append(Remove(slot.seq_id, slot.num_tokens))

    def _evict(self, slot: KvSlot) -> None:
        del self._parked[slot]
        self._free(slot, parked=True)

    def evict_one(self) -> bool:
        """The least recently used parked slot goes; False: there is none."""
        if self._parked:
            self._evict(next(iter(self._parked)))
            return True
        return False

    def _free(self, slot: KvSlot, *, parked: bool) -> None:
        self._prefixes.drop(slot)
        self.pool.release(slot.block_table, parked=parked)
        self._operations.append(Remove(slot.seq_id))
        heapq.heappush(self._free_ids, slot.seq_id)
        slot.num_tokens, slot.is_running = 0, False

    # ---- after a step, and the end

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The first num_tokens of the sequence are in its slot now."""
        slot = sequence.slot
        assert slot is not None, "only a running sequence is computed"
        slot.num_tokens = num_tokens
        if not self.config.prefix_cache or not sequence.uses_cache:
            return
        # What an answer's steps computed one by one, a cold prompt would compute in one go.
        is_exact = self.config.exact
        slot.num_reusable = min(num_tokens, self._prompt_to_reuse(sequence)) if is_exact else num_tokens
        if slot.num_reusable // self.config.block_size > len(slot.path):
            self._prefixes.hold(slot, slot.num_reusable)

    def _prompt_to_reuse(self, sequence: Sequence) -> int:
        """Of its prompt's tokens. Exact: the tail would not be one in a prompt that goes on."""
        num_tokens = sequence.num_prompt_tokens
        return self.config.rule.long_body(num_tokens) if self.config.exact else num_tokens

    def park(self, sequence: Sequence) -> None:
        """The sequence ended: keep its cells for whoever asks the same, unless another slot has them too."""
        slot = sequence.slot
        assert slot is not None, "only a running sequence ends with a slot"
        if not slot.path or len(slot.path[-1].slots) > 1 or not sequence.uses_cache:
            self.release(sequence)
            return
        self._prefixes.drop(slot, len(slot.path))  # what it had announced
        del self._running[slot]
        sequence.slot = None
        slot.is_running = False
        self.pool.release(slot.block_table, self.pool.blocks_for(slot.num_tokens))
        self.pool.park(slot.block_table)
        self._parked[slot] = None

    def release(self, sequence: Sequence) -> None:
        """Give the sequence's cells back, keeping nothing."""
        slot = sequence.slot
        assert slot is not None, "only a running sequence has cells"
        sequence.slot = None
        del self._running[slot]
        self._free(slot, parked=False)

    def release_distrusted(self, sequence: Sequence) -> None:
        """Its shared cells turned out to be incomplete: give them back, and keep no parked slot with that
        prefix, which the next one would be misled by too."""
        slot = sequence.slot
        assert slot is not None, "only a running sequence has cells"
        for other in list(slot.path[0].slots) if slot.path else ():
            if not other.is_running:
                self._evict(other)
        self.release(sequence)

    # ---- preempted sequences

    def num_private_tokens(self, sequence: Sequence) -> int:
        """Tokens that only this sequence holds: what swapping it would save and what preempting it frees."""
        slot = sequence.slot
        assert slot is not None, "only a running sequence is preempted"
        return slot.num_tokens - self._shared_start(slot)

    def _shared_start(self, slot: KvSlot) -> int:
        """Where the part begins that no other slot holds."""
        if self.config.layout == "streams":
            return 0
        blocks = takewhile(lambda block: self.pool.num_holders(block) > 1, slot.block_table)
        return min(slot.num_tokens, sum(1 for _ in blocks) * self.config.block_size)

    def has_swap_space(self, num_tokens: int) -> bool:
        return sum(self._swapped.values()) + num_tokens <= self.config.swap_tokens

    def swap_out(self, sequence: Sequence) -> None:
        """Preempt, keeping in host memory what no other slot holds."""
        slot = sequence.slot
        assert slot is not None, "only a running sequence is preempted"
        start = self._shared_start(slot)
        key, self._next_key = self._next_key, self._next_key + 1
        sequence.swapped = SwappedCells(key, start, slot.num_tokens - start)
        self._operations.append(SwapOut(slot.seq_id, key, start, slot.num_tokens - start))
        self._swapped[key] = sequence.swapped.num_tokens
        self.release(sequence)

    def _swap_in(self, sequence: Sequence, slot: KvSlot) -> None:
        swapped = sequence.swapped
        assert swapped is not None, "it was swapped out"
        if slot.num_tokens < swapped.start:  # the prefix that others held is gone meanwhile: start anew
            self.drop_swapped(sequence)
            return
        end = swapped.start + swapped.num_tokens
        grown = self._grow(slot, end)
        assert grown, "can_admit was asked for all of it"
        self._operations.append(SwapIn(slot.seq_id, swapped.key, swapped.num_tokens))
        del self._swapped[swapped.key]
        sequence.swapped = None
        self.computed(sequence, end)

    def drop_swapped(self, sequence: Sequence) -> None:
        """Forget what was kept in host memory; the sequence is computed again, or has ended."""
        if sequence.swapped is not None:
            self._operations.append(SwapDrop(sequence.swapped.key))
            del self._swapped[sequence.swapped.key]
            sequence.swapped = None

    # ---- streams: who decodes together needs neighbouring ids

    def gather(self, sequences: list[Sequence]) -> None:
        """Move decoding sequences to neighbouring streams where that pays; llama.cpp computes each run of
        consecutive streams in a pass of its own."""
        if self.config.layout == "unified" or len(sequences) < 2:
            return
        slots = {s.slot.seq_id: s for s in sequences if s.slot is not None}
        ids = sorted(slots)
        width = len(ids)
        if ids[-1] - ids[0] == width - 1:
            return
        bases = range(max(0, min(ids[0], self.config.num_seq_ids - width)), ids[-1] - width + 2)
        base = max(bases, key=lambda b: sum(1 for i in ids if b <= i < b + width))
        room = _MAX_MOVED
        holes = [SeqId(i) for i in range(base, base + width) if i not in slots]
        occupants = {slot.seq_id: slot for slot in (*self._running, *self._parked)}
        for seq_id, hole in zip((i for i in ids if not base <= i < base + width), holes, strict=True):
            sequence, other = slots[seq_id], occupants.get(hole)
            slot = sequence.slot
            assert slot is not None, "it runs"
            moved = slot.num_tokens + (other.num_tokens if other is not None else 0)
            num_left = sequence.request.num_max_tokens - sequence.num_output_tokens
            if moved > room or num_left * _TOKENS_MOVED_PER_PASS < 4 * moved:
                continue
            room -= moved
            if other is not None:
                self._operations.append(Exchange(seq_id, hole))
                other.seq_id = seq_id
            else:
                self._operations += (Copy(seq_id, hole, slot.num_tokens), Remove(seq_id))
                self._free_ids.remove(hole)
                self._free_ids.append(seq_id)
                heapq.heapify(self._free_ids)
            slot.seq_id = hole

    # ---- what the step must do, and facts

    def take_operations(self) -> tuple[KvOperation, ...]:
        """What has to happen on llama.cpp before the next step; the list starts anew."""
        operations = tuple(self._operations)
        self._operations.clear()
        return operations

    @property
    def has_operations(self) -> bool:
        return bool(self._operations)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

    @property
    def num_swapped_tokens(self) -> int:
        return sum(self._swapped.values())

    def waste(self) -> float:
        """Share of the held cells that nothing was written to: ends of last blocks."""
        held = (self.pool.num_blocks - self.pool.num_free) * self.config.block_size
        slots = (*self._running, *self._parked)
        unwritten = sum(len(s.block_table) * self.config.block_size - s.num_tokens for s in slots)
        return unwritten / held if held else 0.0

    def held(self) -> dict[SeqId, int]:
        """How many tokens each sequence id holds once the noted operations are done."""
        return {slot.seq_id: slot.num_tokens for slot in (*self._running, *self._parked)}

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Blocks, ids, slots and tree agree with each other and with the running sequences."""
        running = [s.slot for s in sequences]
        assert set(running) == set(self._running), "a running slot belongs to no running sequence"
        slots = [*self._running, *self._parked]
        ids = [*self._free_ids, *(slot.seq_id for slot in slots)]
        assert sorted(ids) == list(range(self.config.num_seq_ids)), "a sequence id is lost or held twice"
        assert all(s.is_running for s in self._running) and not any(s.is_running for s in self._parked)
        for slot in slots:
            assert len(slot.block_table) >= self.pool.blocks_for(slot.num_tokens), "tokens without a block"
            assert slot.num_reusable <= slot.num_tokens, "more to reuse than there is"
        self.pool.check_integrity(
            (slot.block_table for slot in self._running), (slot.block_table for slot in self._parked)
        )
        self._prefixes.check_integrity(slots)

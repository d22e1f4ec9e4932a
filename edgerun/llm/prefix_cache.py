"""Which sequences hold which token prefix: a radix tree with one node a block of tokens. Pure Python.

Knows nothing of cells or of eviction order (see kv_cache.py). A node is its whole path, so a prefix is found
by its tokens and never confused with another one; the chained hashes only name what was evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from edgerun.llm.request import BlockId, SeqId

_REMEMBERED_EVICTIONS = 4096


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One whole block behind its parent's. `slots` hold it now; `announced_by` is about to compute it.

    Whoever holds a node holds its parent too.
    """

    parent: PrefixNode | None
    tokens: tuple[int, ...]
    chain_hash: int
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    slots: dict[KvSlot, None] = field(default_factory=dict)  # an ordered set
    announced_by: KvSlot | None = None


@dataclass(slots=True, eq=False)
class KvSlot:
    """What one of llama.cpp's sequence ids holds: positions 0 .. num_tokens - 1 of `tokens`.

    Belongs to a running sequence, or to nobody while it is parked. num_reusable: how many of its tokens
    another sequence may take over.
    """

    seq_id: SeqId
    tokens: list[int]
    num_tokens: int = 0
    num_reusable: int = 0
    block_table: list[BlockId] = field(default_factory=list)
    path: list[PrefixNode] = field(default_factory=list)  # the whole blocks it holds, as nodes
    announced: list[PrefixNode] = field(default_factory=list)
    is_running: bool = True


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """num_blocks: whole blocks that `slots` hold. Behind them `awaited` will compute up to awaited_tokens."""

    num_blocks: int
    slots: tuple[KvSlot, ...]
    awaited: KvSlot | None = None
    awaited_tokens: int = 0
    was_evicted: bool = False  # the next block was here once


class PrefixCache:
    """The tree. Its nodes exist as long as a slot holds them or has announced them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = PrefixNode(None, (), 0)
        self._evicted: OrderedDict[int, None] = OrderedDict()

    def match(self, tokens: list[int], max_tokens: int) -> PrefixMatch:
        """The longest prefix of tokens[:max_tokens] in whole blocks that slots hold."""
        node, depth, size = self._root, 0, self._block_size
        blocks = self._blocks(tokens, max_tokens)
        block: tuple[int, ...] | None = None
        for block in blocks:
            child = node.children.get(block)
            if child is None or not child.slots:
                break
            node, depth = child, depth + 1
        else:
            return PrefixMatch(depth, tuple(node.slots))
        awaited = child.announced_by if child is not None else None
        end = depth
        if awaited is not None:
            end += 1
            for block in blocks:
                child = child.children.get(block) if child is not None else None
                if child is None or child.announced_by is not awaited:
                    break
                end += 1
        was_evicted = hash((node.chain_hash, block)) in self._evicted if awaited is None else False
        return PrefixMatch(depth, tuple(node.slots), awaited, end * size, was_evicted)

    def _blocks(self, tokens: list[int], end: int, start: int = 0) -> Iterator[tuple[int, ...]]:
        size = self._block_size
        for i in range(start, end // size):
            yield tuple(tokens[i * size : (i + 1) * size])

    def announce(self, slot: KvSlot, num_tokens: int) -> None:
        """slot is going to compute its first num_tokens: others with the same prefix may wait for them."""
        node = slot.path[-1] if slot.path else self._root
        for block in self._blocks(slot.tokens, num_tokens, len(slot.path)):
            node = self._child(node, block)
            if not node.slots and node.announced_by is None:
                node.announced_by = slot
                slot.announced.append(node)

    def hold(self, slot: KvSlot, num_tokens: int) -> None:
        """slot now has its first num_tokens computed; the whole blocks of them can be found."""
        node = slot.path[-1] if slot.path else self._root
        for block in self._blocks(slot.tokens, num_tokens, len(slot.path)):
            node = self._child(node, block)
            node.slots[slot] = None
            node.announced_by = None
            slot.path.append(node)
            self._evicted.pop(node.chain_hash, None)

    def drop(self, slot: KvSlot, keep: int = 0) -> None:
        """slot no longer holds, nor announces, anything but its first `keep` blocks."""
        for node in reversed(slot.announced):
            if node.announced_by is slot:
                node.announced_by = None
            self._prune(node)
        slot.announced.clear()
        for node in reversed(slot.path[keep:]):
            del node.slots[slot]
            if not node.slots:
                self._remember(node.chain_hash)
            self._prune(node)
        del slot.path[keep:]

    def _child(self, node: PrefixNode, block: tuple[int, ...]) -> PrefixNode:
        child = node.children.get(block)
        if child is None:
            child = PrefixNode(node, block, hash((node.chain_hash, block)))
            node.children[block] = child
        return child

    def _prune(self, node: PrefixNode) -> None:
        while not (node.slots or node.children or node.announced_by) and node.parent is not None:
            parent = node.parent
            if parent.children.get(node.tokens) is node:
                del parent.children[node.tokens]
            node = parent

    def _remember(self, chain_hash: int) -> None:
        self._evicted[chain_hash] = None
        if len(self._evicted) > _REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def check_integrity(self, slots: list[KvSlot]) -> None:
        """The tree holds the slots' paths and nothing else. AssertionError otherwise."""
        found: dict[KvSlot, int] = {}
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            assert node.slots or node.children or node.announced_by, "an empty node was left behind"
            for slot in node.slots:
                found[slot] = found.get(slot, 0) + 1
                assert node.parent is self._root or slot in (node.parent or node).slots, "a path has a hole"
            assert node.announced_by is None or node.announced_by.is_running, "nobody computes a node"
            pending.extend(node.children.values())
        assert found == {slot: len(slot.path) for slot in slots if slot.path}, "a path is not in the tree"

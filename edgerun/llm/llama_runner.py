"""Replays a step against llama.cpp and samples. Owned by the engine thread.

Knows batches, logits and samplers; does not know why a step looks as it does (see scheduler).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

from edgerun.errors import ModelError, ModelLoadFailed
from edgerun.llm.llama_api import DECODE_NO_ROOM, LlamaContext, LlamaModel
from edgerun.llm.llama_sequences import SavedCells
from edgerun.llm.request import RequestId, SeqId
from edgerun.llm.sampling import Sampler
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import (
    CallTiming,
    Copy,
    Exchange,
    FailedSequence,
    KvMismatch,
    KvOperation,
    ModelRunnerOutput,
    Remove,
    SampledToken,
    ScheduledChunk,
    SchedulerOutput,
    SwapDrop,
    SwapIn,
    SwapOut,
)
from edgerun.llm.thread_governor import ThreadGovernor

_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class CallRule:
    """How a step is cut into calls of the model.

    separate: decodes in one call, each prompt chunk in another, so that what runs beside a prompt does not
    choose its kernels (see chunks.py). Else all in one, which saves a GPU a pass over the weights.
    joins_equal: chunks of one length in neighbouring streams share a call; llama.cpp computes them side by
    side.
    cells_per_pass: streams alone. A call attends to as many cells in each stream as in its longest one; more
    cells than this in vain, and another pass over the weights is cheaper. 0: never split.
    """

    separate: bool
    joins_equal: bool
    cells_per_pass: int = 0


class LlamaRunner:
    """One model and its context. Closing frees both.

    spare_id: a sequence id that nobody else uses. governor: None keeps the threads of the context.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: LlamaContext,
        end_tokens: Tokens[int],
        rule: CallRule,
        spare_id: int,
        governor: ThreadGovernor | None = None,
    ) -> None:
        self._model, self._context = model, context
        self._end_tokens = tuple(end_tokens)
        self._rule, self._spare_id, self._governor = rule, spare_id, governor
        self._num_threads = context.settings.num_threads
        self._samplers: dict[RequestId, Sampler] = {}
        self._swapped: dict[int, SavedCells] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Do the operations, decode, sample. Raises KvMismatch when nothing was computed."""
        num_swapped, swap_s = self._operate(step)
        computed: list[ScheduledChunk] = []
        sampled: list[SampledToken] = []
        failed: list[FailedSequence] = []
        timings = []
        had_room = True
        for chunks in self._calls(step.chunks):
            began_s = time.perf_counter()
            wanted = self._fill(chunks)
            if self._context.decode() == DECODE_NO_ROOM:
                had_room = False
                break
            for index, chunk in wanted:
                try:
                    sampled.append(SampledToken(chunk.sequence, self._sample(index, chunk.sequence)))
                except ModelError as error:
                    failed.append(FailedSequence(chunk.sequence, error))
            computed += chunks
            timings.append(_timing(chunks, time.perf_counter() - began_s))
        self._govern(_join_decodes(timings))
        return ModelRunnerOutput(
            computed=tuple(computed),
            sampled=tuple(sampled),
            failed=tuple(failed),
            timings=_join_decodes(timings),
            num_swapped_tokens=num_swapped,
            swap_s=swap_s,
            had_room=had_room,
        )

    def _govern(self, timings: tuple[CallTiming, ...]) -> None:
        """Learn from calls that only decoded, and set the threads for the next step."""
        if self._governor is None:
            return
        for timing in timings:
            if timing.num_prompt_tokens == 0:
                self._governor.see(timing.num_decodes, timing.duration_s)
        if self._governor.num_threads != self._num_threads:
            self._num_threads = self._governor.num_threads
            self._context.set_num_threads(self._num_threads)

    def _calls(self, chunks: tuple[ScheduledChunk, ...]) -> Iterator[list[ScheduledChunk]]:
        """The step, cut into calls. Neighbouring ids side by side: streams want them in order."""
        in_order = sorted(chunks, key=lambda chunk: chunk.seq_id)
        if not self._rule.separate:
            if in_order:
                yield in_order
            return
        call: list[ScheduledChunk] = []
        prompts = [chunk for chunk in in_order if not chunk.is_decode]
        for chunk in sorted(prompts, key=lambda chunk: chunk.num_tokens):
            if call and not (self._rule.joins_equal and _are_alike(call[-1], chunk)):
                yield call
                call = []
            call.append(chunk)
        if call:
            yield call
        # Behind the prompts: the last token of a prompt may be among them.
        decodes = [chunk for chunk in in_order if chunk.is_decode]
        if decodes:
            yield from split_by_length(decodes, self._rule.cells_per_pass)

    def _fill(self, chunks: list[ScheduledChunk]) -> list[tuple[int, ScheduledChunk]]:
        """The batch of a call; the chunks that want a token, each with its place in the batch."""
        batch = self._context.batch
        batch.clear()
        wanted = []
        for chunk in chunks:
            tokens = chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
            index = batch.add(chunk.seq_id, tokens, chunk.start, wants_logits=chunk.wants_token)
            if chunk.wants_token:
                wanted.append((index, chunk))
        return wanted

    def _sample(self, batch_index: int, sequence: Sequence) -> int:
        request = sequence.request
        sampler = self._samplers.get(request.request_id)
        if sampler is None:
            sampler = Sampler(request.sampling, self._model.num_tokens, self._end_tokens)
            self._samplers[request.request_id] = sampler
        logits = self._context.logits(batch_index)
        return sampler.sample(logits, sequence.tokens, sequence.num_prompt_tokens)

    # ---- the KV cache

    def _operate(self, step: SchedulerOutput) -> tuple[int, float]:
        """Carry the operations out; tokens moved from and to host memory, and the seconds it took."""
        touched: set[SeqId] = set()
        num_swapped, swap_s = 0, 0.0
        for operation in step.kv_operations:
            began_s = time.perf_counter()
            if isinstance(operation, SwapOut | SwapIn):
                num_swapped += operation.num_tokens
            touched.add(self._do(operation))
            if isinstance(operation, SwapOut | SwapIn):
                swap_s += time.perf_counter() - began_s
        for chunk in step.chunks if touched else ():
            if chunk.seq_id in touched and not self._is_complete(chunk.seq_id, chunk.start):
                raise KvMismatch(chunk.sequence)
            touched.discard(chunk.seq_id)  # a second chunk begins where the first one will end
        return num_swapped, swap_s

    def _is_complete(self, seq_id: SeqId, num_tokens: int) -> bool:
        """Whether it holds num_tokens. A sliding window may have dropped the first ones, which whoever starts
        from them needs; of a recurrent model only the newest state is there."""
        first, last = self._context.position_range(seq_id)
        has_cells = self._model.memory_kind() in ("plain", "window")
        return last == num_tokens - 1 and (first <= 0 or not has_cells)

    def _do(self, operation: KvOperation) -> SeqId:
        """Carry one out; the id whose cells are others now, -1 for none."""
        context = self._context
        match operation:
            case Remove(seq_id, start):
                context.remove_sequence(seq_id, start)
            case Copy(source, seq_id, num_tokens):
                context.copy_sequence(source, seq_id, num_tokens)
            case Exchange(first, seq_id):
                context.exchange_sequences(first, seq_id)
            case SwapOut(seq_id, key, start):
                self._swapped[key] = context.save_tail(seq_id, start, self._spare_id)
            case SwapIn(seq_id, key):
                context.load_tail(seq_id, self._swapped.pop(key), self._spare_id)
            case SwapDrop(key):
                self._swapped.pop(key, None)
                seq_id = SeqId(-1)
        return seq_id

    @property
    def swapped_bytes(self) -> int:
        """Host memory that preempted sequences take."""
        return sum(len(saved) for saved in tuple(self._swapped.values()))

    def check_integrity(self, num_tokens: dict[SeqId, int]) -> None:
        """llama.cpp's positions are those of the accounting. AssertionError otherwise."""
        for seq_id in map(SeqId, range(self._context.settings.num_seq_ids)):
            held = num_tokens.get(seq_id, 0)
            first, last = self._context.position_range(seq_id)
            # A cut may leave nothing of a sliding window; who starts from that is told (see _is_complete).
            is_gone = last == -1 and self._model.memory_kind() == "window"
            is_right = last == held - 1 or is_gone
            assert is_right, f"sequence id {seq_id} ends at position {last}, not {held - 1}"
            if self._model.memory_kind() == "plain":
                assert first == (0 if held else -1), f"sequence id {seq_id} begins at position {first}"

    # ---- life

    def forget(self, sequence: Sequence) -> None:
        self._samplers.pop(sequence.request.request_id, None)

    def warm_up(self) -> None:
        """A prompt and a single token through the network: the two kinds of kernels that a chat uses.

        The first user does not pay for the first touch of the weights, and a build that crashes on either
        does so in the throw-away child (see engine/check.py), not in somebody's chat. Raises ModelLoadFailed
        when NaN or infinity comes out.
        """
        token = max(0, self._model.bos())
        prompt_tokens = min(_WARM_UP_TOKENS, self._context.batch.capacity)
        for num_tokens, start in ((prompt_tokens, 0), (1, prompt_tokens)):
            self._context.batch.clear()
            last = self._context.batch.add(0, [token] * num_tokens, start, wants_logits=True)
            self._context.decode()
            if not np.isfinite(self._context.logits(last).max()):
                path = self._model.path
                raise ModelLoadFailed(
                    f"{path} computes scores that are not finite (NaN or infinity): the file is damaged or "
                    "was converted wrongly; fetch it again",
                    path=path,
                )
        self._context.remove_sequence(0)

    def close(self) -> None:
        self._swapped.clear()
        self._context.close()
        self._model.close()


def _are_alike(one: ScheduledChunk, other: ScheduledChunk) -> bool:
    return one.num_tokens == other.num_tokens and one.seq_id + 1 == other.seq_id


def split_by_length(decodes: list[ScheduledChunk], cells_per_pass: int) -> list[list[ScheduledChunk]]:
    """Cut decodes, in the order of their streams, where the cells attended to in vain cost more than a pass.

    The cheapest cut into runs, where a run costs a pass and, for each of its streams, its longest one.
    """
    lengths = [chunk.start for chunk in decodes]
    if not cells_per_pass or sum(max(lengths) - length for length in lengths) <= cells_per_pass:
        return [decodes]
    best: list[tuple[int, int]] = [(0, 0)]  # of the first i: cost, and where the last run begins
    for end in range(1, len(decodes) + 1):
        longest, options = 0, []
        for start in range(end - 1, -1, -1):
            longest = max(longest, lengths[start])
            options.append((best[start][0] + cells_per_pass + (end - start) * longest, start))
        best.append(min(options))
    runs, end = [], len(decodes)
    while end:
        start = best[end][1]
        runs.append(decodes[start:end])
        end = start
    return runs[::-1]


def _join_decodes(timings: list[CallTiming]) -> tuple[CallTiming, ...]:
    """What was decoded in several calls, as one: the scheduler thinks of all decodes of a step together."""
    decodes = [timing for timing in timings if timing.num_prompt_tokens == 0]
    if len(decodes) < 2:
        return tuple(timings)
    whole = CallTiming(sum(t.num_decodes for t in decodes), 0, sum(t.duration_s for t in decodes))
    return (*(timing for timing in timings if timing.num_prompt_tokens), whole)


def _timing(chunks: list[ScheduledChunk], duration_s: float) -> CallTiming:
    num_decodes = sum(1 for chunk in chunks if chunk.is_decode)
    num_prompt_tokens = sum(chunk.num_tokens for chunk in chunks if not chunk.is_decode)
    return CallTiming(num_decodes, num_prompt_tokens, duration_s)

"""One loaded language model inside the engine process: its tokenising thread in front of the engine thread.

The main loop of the process calls submit, abort, tokenize and close; replies go out from the two threads.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable

from edgerun.engine.messages import (
    Failed,
    LlmStats,
    Message,
    Submit,
    Tokenize,
    Tokenized,
    TokenOutput,
    Tokens,
)
from edgerun.errors import ContextLengthExceeded, EngineLost, InvalidRequest
from edgerun.llm.chunks import ChunkRule
from edgerun.llm.engine import LlmEngine
from edgerun.llm.kv_cache import KvCache, KvCacheConfig
from edgerun.llm.llama_api import LlamaModel
from edgerun.llm.loader import LoadedLlm
from edgerun.llm.loop import EngineLoop
from edgerun.llm.request import Request, RequestId
from edgerun.llm.scheduler import Scheduler, SchedulerLimits
from edgerun.text.prompt import Prompt

# Pre-tokenizers of some vocabularies recurse per character: one word of 100,000 letters needs a deep stack.
_TOKENIZER_STACK_BYTES = 512 * 2**20  # address space; only what is touched becomes memory


class LlmWorker:
    """Owns the tokenising thread of one model. `reply` is called from it and from the engine thread."""

    def __init__(self, loaded: LoadedLlm, loop: EngineLoop, reply: Callable[[Message], None]) -> None:
        settings = loaded.settings
        self.info, self.memory_bytes = loaded.info, loaded.memory_bytes
        self._tokenizer = PromptTokenizer(loaded.model, settings.max_model_len)
        self._max_model_len = settings.max_model_len
        self._reply = reply
        scheduler, kv = make_scheduler(loaded)
        self._engine = LlmEngine(
            loop,
            scheduler,
            kv,
            loaded.runner,
            reply,
            settings.max_num_seqs,
            kv_bytes_per_token=loaded.facts.kv_bytes_per_token,
        )
        self._engine.start()
        self._inbox: queue.SimpleQueue[Submit | Tokenize | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._before_engine: set[int] = set()  # submitted, not yet with the engine; guarded by _lock
        self._is_closed = False  # guarded by _lock
        self._thread = _start_thread(self._run, _TOKENIZER_STACK_BYTES)

    def submit(self, message: Submit) -> None:
        """Answered by Accepted and Tokens, or by Failed; by Failed at once after close."""
        with self._lock:
            self._before_engine.add(message.request_id)
        self._put(message)

    def tokenize(self, message: Tokenize) -> None:
        """Answered by Tokenized or Failed."""
        self._put(message)

    def _put(self, message: Submit | Tokenize) -> None:
        with self._lock:
            if not self._is_closed:
                self._inbox.put(message)
                return
        self._reply(Failed.of(message.request_id, EngineLost("the model was unloaded")))

    def abort(self, request_id: int) -> None:
        """Unknown or finished ids are ignored."""
        with self._lock:
            if request_id in self._before_engine:
                self._before_engine.discard(request_id)  # the tokenising thread sees that it is gone
                return
        self._engine.abort(RequestId(request_id))

    def stats(self) -> LlmStats:
        return self._engine.stats()

    def close(self) -> None:
        """What was submitted before ends with EngineLost; the model is freed."""
        with self._lock:
            self._is_closed = True
            self._inbox.put(None)  # behind everything that was let in
        self._thread.join()
        self._engine.close()

    # ---- the tokenising thread

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            try:
                self._handle(message)
            except Exception as error:  # whatever it is, it must end as an answer and leave the thread alive
                with self._lock:
                    self._before_engine.discard(message.request_id)
                self._reply(Failed.of(message.request_id, error))

    def _handle(self, message: Submit | Tokenize) -> None:
        ids = self._tokenizer.tokenize(message.prompt)
        if isinstance(message, Tokenize):
            self._reply(Tokenized(request_id=message.request_id, token_ids=ids))
            return
        request = self._request(message, ids)
        with self._lock:  # the engine has it before an abort can look for it there
            is_wanted = message.request_id in self._before_engine
            self._before_engine.discard(message.request_id)
            if is_wanted:
                self._engine.submit(request)
        if not is_wanted:
            self._reply(Tokens(outputs=[TokenOutput(message.request_id, [], 0, "abort")]))

    def _request(self, message: Submit, ids: list[int]) -> Request:
        room = self._max_model_len - len(ids)
        if room < 1:
            raise _too_long(len(ids), self._max_model_len)
        asked, now_s = message.prompt.sampling.max_tokens, time.monotonic()
        return Request(
            request_id=RequestId(message.request_id),
            prompt_token_ids=tuple(ids),
            sampling=message.prompt.sampling,
            num_max_tokens=room if asked is None else min(asked, room),
            priority=message.prompt.priority,
            arrival_s=now_s,
            client=message.prompt.client,
            deadline_s=now_s + message.prompt.deadline_s if message.prompt.deadline_s > 0 else math.inf,
        )


def make_scheduler(loaded: LoadedLlm) -> tuple[Scheduler, KvCache]:
    """The scheduler and the KV cache that fit what was loaded."""
    resolved, settings = loaded.resolved, loaded.settings
    blocks_per_sequence = -(-settings.max_model_len // settings.block_size)
    rule = ChunkRule.of(flash_attention=resolved.has_flash_attention)
    # On a GPU a deterministic model runs one sequence at a time and reuses nothing.
    is_exact = loaded.is_deterministic and not loaded.facts.use_gpu
    kv = KvCache(
        KvCacheConfig(
            layout="unified" if resolved.is_unified else "streams",
            num_blocks=settings.num_kv_tokens // settings.block_size
            if resolved.is_unified
            else resolved.num_seq_ids * blocks_per_sequence,
            num_seq_ids=resolved.num_seq_ids,
            rule=rule,
            block_size=settings.block_size,
            prefix_cache=settings.prefix_cache,
            exact=is_exact,
            swap_tokens=settings.swap_space_bytes // max(1, loaded.facts.kv_bytes_per_token),
        )
    )
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        inter_token_target_s=settings.inter_token_target_ms / 1000,
        exact=is_exact,
    )
    return Scheduler(kv, limits, rule, loaded.info.eog_token_ids), kv


class PromptTokenizer:
    """Prompt to ids. Control tokens come only from the pieces that the template wrote."""

    def __init__(self, model: LlamaModel, max_model_len: int) -> None:
        self._model, self._max_model_len = model, max_model_len
        self._bos, self._adds_bos = model.bos(), model.adds_bos()
        self._longest_piece = max((len(piece) for piece in model.pieces()), default=1) or 1

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Ids with at most one BOS in front. Raises InvalidRequest, ContextLengthExceeded."""
        if prompt.token_ids:
            return self._checked(prompt.token_ids)
        size_bytes = sum(len(s.text) for s in prompt.segments)
        if size_bytes > self._max_model_len * self._longest_piece:
            # Even if each token were the longest one it could not fit: spare the tokenizer.
            raise _too_long(-(-size_bytes // self._longest_piece), self._max_model_len, at_least=True)
        ids: list[int] = []
        for segment in prompt.segments:
            ids += self._model.tokenize(segment.text, special=segment.special)
        if prompt.add_bos and self._adds_bos and self._bos >= 0 and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        if not ids:
            raise InvalidRequest("the prompt is empty: nothing to continue from")
        return ids

    def _checked(self, ids: tuple[int, ...]) -> list[int]:
        count = self._model.num_tokens
        bad = next((i for i in ids if not 0 <= i < count), None)
        if bad is not None:
            raise InvalidRequest(
                f"token id {bad} is outside the vocabulary (0 to {count - 1})", param="prompt"
            )
        return list(ids)


def _too_long(num_tokens: int, max_model_len: int, *, at_least: bool = False) -> ContextLengthExceeded:
    count = f"at least {num_tokens}" if at_least else str(num_tokens)
    return ContextLengthExceeded(
        f"the prompt has {count} tokens and the model's context is {max_model_len} tokens "
        "(one must be left for the answer); shorten the messages",
        num_prompt_tokens=num_tokens,
        max_model_len=max_model_len,
        code="context_length_exceeded",
        param="messages",
    )


def _start_thread(target: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """threading.stack_size is a setting of the process: put it back at once."""
    before = threading.stack_size(stack_bytes)
    try:
        thread = threading.Thread(target=target, name="llm-tokenizer", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread

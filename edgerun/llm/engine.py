"""The language model's loop: take requests in, schedule, execute, hand tokens out.

Owns the engine thread of one model. Everything that touches sequences, blocks or llama.cpp's context
happens on that thread; the other threads only put commands into its inbox.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from edgerun.engine.messages import Accepted, Failed, LlmStats, Message, TokenOutput, Tokens
from edgerun.errors import EngineLost, QueueFull
from edgerun.llm.block_pool import BlockPool
from edgerun.llm.request import Request, RequestId
from edgerun.llm.scheduler import Scheduler, SequenceOutput
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import ModelRunner, NoKvRoom

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class LlmEngine:
    """Continuous batching over one runner. `reply` is called on the engine thread.

    Every submitted request gets Accepted and then Tokens, the last with a finish_reason; or one Failed.
    An unexpected exception in a step is fatal: `on_fatal` is called, and the process is expected to end,
    since the state of the native context is unknown then.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        runner: ModelRunner,
        reply: Callable[[Message], None],
        on_fatal: Callable[[BaseException], None],
        max_num_seqs: int,
    ) -> None:
        self._scheduler, self._pool, self._runner = scheduler, pool, runner
        self._reply, self._on_fatal, self._max_num_seqs = reply, on_fatal, max_num_seqs
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        # Written by the engine thread alone; others read single integers.
        self._num_steps = self._num_prompt_tokens = self._num_generated = 0

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """From any thread."""
        self._inbox.put(_Submit(request))

    def abort(self, request_id: RequestId) -> None:
        """From any thread; takes effect before the next step."""
        self._inbox.put(_Abort(request_id))

    def close(self) -> None:
        """Stop after the running step; requests still here end with EngineLost. Then free the model."""
        self._inbox.put(_Stop())
        if self._thread.ident is not None:
            self._thread.join()
        self._runner.close()

    def stats(self) -> LlmStats:
        """From any thread: a snapshot, each number right by itself."""
        return LlmStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            max_num_seqs=self._max_num_seqs,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            prompt_tokens_total=self._num_prompt_tokens,
            generation_tokens_total=self._num_generated,
            prefix_cache_queries_total=0,
            prefix_cache_hits_total=0,
            preemptions_total=self._scheduler.num_preemptions,
            steps_total=self._num_steps,
        )

    # ---- the engine thread

    def _run(self) -> None:
        try:
            while self._take_commands(block=not self._scheduler.has_work):
                if self._scheduler.has_work:
                    self.step()
        except BaseException as error:  # whatever it is, the native state is unknown now
            logger.exception("a step failed; the engine process ends")
            self._on_fatal(error)

    def _take_commands(self, *, block: bool) -> bool:
        """Carry out what lies in the inbox; wait for something when block. False after _Stop."""
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if isinstance(command, _Submit):
                self._take(command.request)
            elif isinstance(command, _Abort):
                self._drop(command.request_id)
            else:
                self._fail_all()
                return False

    def _take(self, request: Request) -> None:
        try:
            self._scheduler.add(Sequence.of(request))
        except QueueFull as error:
            self._reply(Failed.of(request.request_id, error))
            return
        self._num_prompt_tokens += len(request.prompt_token_ids)
        self._reply(Accepted(request_id=request.request_id, num_prompt_tokens=len(request.prompt_token_ids)))

    def _drop(self, request_id: RequestId) -> None:
        sequence = self._scheduler.abort(request_id)
        if sequence is not None:
            self._runner.forget(sequence)
            self._reply(Tokens(outputs=[TokenOutput(request_id, [], 0, "abort")]))

    def _fail_all(self) -> None:
        lost = EngineLost("the model was unloaded while the request ran")
        for sequence in self._scheduler.abort_all():
            self._reply(Failed.of(sequence.request.request_id, lost))

    def step(self) -> None:
        """One schedule, execute, update."""
        step = self._scheduler.schedule()
        try:
            result = self._runner.execute(step)
        except NoKvRoom:
            self._scheduler.no_room()
            return
        outputs = self._scheduler.update(step, result)
        self._num_steps += 1
        if outputs:
            self._hand_out(outputs)

    def _hand_out(self, outputs: list[SequenceOutput]) -> None:
        messages = []
        for output in outputs:
            self._num_generated += len(output.token_ids)
            request_id = output.sequence.request.request_id
            messages.append(TokenOutput(request_id, list(output.token_ids), 0, output.finish_reason))
            if output.finish_reason is not None:
                self._runner.forget(output.sequence)
        self._reply(Tokens(outputs=messages))

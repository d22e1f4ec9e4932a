"""One language model's requests on the engine thread: take them in, schedule, execute, hand tokens out.

Everything that touches sequences, blocks or llama.cpp's context happens on the engine thread (see loop.py);
the methods that other threads call only put commands there.
"""

from __future__ import annotations

from collections.abc import Callable

from edgerun.engine.messages import Accepted, Failed, LlmStats, Message, TokenOutput, Tokens
from edgerun.errors import EngineLost, QueueFull
from edgerun.llm.block_pool import BlockPool
from edgerun.llm.loop import EngineLoop
from edgerun.llm.request import Request, RequestId
from edgerun.llm.scheduler import Scheduler, SequenceOutput
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import FailedSequence, ModelRunner, NoKvRoom


class LlmEngine:
    """Continuous batching over one runner. `reply` is called on the engine thread.

    Every submitted request gets Accepted and then Tokens, the last with a finish_reason; or one Failed.
    """

    def __init__(
        self,
        loop: EngineLoop,
        scheduler: Scheduler,
        pool: BlockPool,
        runner: ModelRunner,
        reply: Callable[[Message], None],
        max_num_seqs: int,
    ) -> None:
        self._loop, self._scheduler, self._pool, self._runner = loop, scheduler, pool, runner
        self._reply, self._max_num_seqs = reply, max_num_seqs
        # Written by the engine thread alone; others read single integers.
        self._num_steps = self._num_prompt_tokens = self._num_generated = 0

    # ---- from other threads

    def start(self) -> None:
        """Warm the model up and join the loop. Raises what the warm-up does."""
        self._loop.call(self._start)

    def submit(self, request: Request) -> None:
        self._loop.put(lambda: self._take(request))

    def abort(self, request_id: RequestId) -> None:
        """Takes effect before the next step; unknown ids are ignored."""
        self._loop.put(lambda: self._drop(request_id))

    def close(self) -> None:
        """Leave the loop and free the model; requests still here end with EngineLost."""
        self._loop.call(self._close)

    def stats(self) -> LlmStats:
        """A snapshot, each number right by itself."""
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

    # ---- on the engine thread

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

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
        for failed in result.failed:
            self._fail(failed)

    def _start(self) -> None:
        self._runner.warm_up()
        self._loop.add(self)

    def _close(self) -> None:
        lost = EngineLost("the model was unloaded while the request ran")
        for sequence in self._scheduler.abort_all():
            self._reply(Failed.of(sequence.request.request_id, lost))
        self._loop.remove(self)
        self._runner.close()

    def _take(self, request: Request) -> None:
        try:
            self._scheduler.add(Sequence.of(request))
        except QueueFull as error:
            self._reply(Failed.of(request.request_id, error))
            return
        num_tokens = len(request.prompt_token_ids)
        self._num_prompt_tokens += num_tokens
        self._reply(Accepted(request_id=request.request_id, num_prompt_tokens=num_tokens))

    def _drop(self, request_id: RequestId) -> None:
        sequence = self._scheduler.abort(request_id)
        if sequence is not None:
            self._runner.forget(sequence)
            self._reply(Tokens(outputs=[TokenOutput(request_id, [], 0, "abort")]))

    def _fail(self, failed: FailedSequence) -> None:
        request_id = failed.sequence.request.request_id
        self._scheduler.abort(request_id)
        self._runner.forget(failed.sequence)
        self._reply(Failed.of(request_id, failed.error))

    def _hand_out(self, outputs: list[SequenceOutput]) -> None:
        messages = []
        for output in outputs:
            self._num_generated += len(output.token_ids)
            request_id = output.sequence.request.request_id
            messages.append(TokenOutput(request_id, list(output.token_ids), 0, output.finish_reason))
            if output.finish_reason is not None:
                self._runner.forget(output.sequence)
        self._reply(Tokens(outputs=messages))

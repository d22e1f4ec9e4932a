"""One language model's requests on the engine thread: take them in, schedule, execute, hand tokens out.

Everything that touches sequences, blocks or llama.cpp's context happens on the engine thread (see loop.py);
the methods that other threads call only put commands there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from edgerun.engine.messages import Accepted, Failed, LlmStats, Message, TokenOutput, Tokens
from edgerun.errors import DeadlineExceeded, EngineLost, QueueFull
from edgerun.llm.kv_cache import KvCache
from edgerun.llm.loop import EngineLoop
from edgerun.llm.request import Request, RequestId
from edgerun.llm.scheduler import Scheduler, SequenceOutput
from edgerun.llm.sequence import Sequence
from edgerun.llm.step import FailedSequence, KvMismatch, ModelRunner, SchedulerOutput

logger = logging.getLogger(__name__)

_STEPS_BETWEEN_WASTE = 16


class LlmEngine:
    """Continuous batching over one runner. `reply` is called on the engine thread.

    Every submitted request gets Accepted and then Tokens, the last with a finish_reason; or one Failed.
    """

    def __init__(
        self,
        loop: EngineLoop,
        scheduler: Scheduler,
        kv: KvCache,
        runner: ModelRunner,
        reply: Callable[[Message], None],
        max_num_seqs: int,
        kv_bytes_per_token: int = 0,
    ) -> None:
        self._loop, self._scheduler, self._kv, self._runner = loop, scheduler, kv, runner
        self._reply, self._max_num_seqs, self._kv_bytes_per_token = reply, max_num_seqs, kv_bytes_per_token
        self._kv_waste = 0.0  # of the last step that ran a while
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
        kv, scheduler, cost = self._kv, self._scheduler, self._scheduler.planner.cost
        return LlmStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            max_num_seqs=self._max_num_seqs,
            num_blocks=kv.pool.num_blocks,
            num_free_blocks=kv.pool.num_available,
            prompt_tokens_total=self._num_prompt_tokens,
            generation_tokens_total=self._num_generated,
            prefix_cache_queries_total=kv.num_queried_tokens,
            prefix_cache_hits_total=kv.num_hit_tokens,
            preemptions_total=scheduler.num_preemptions,
            steps_total=self._num_steps,
            prefix_misses=dict(kv.misses),
            num_parked=kv.num_parked,
            num_swapped=kv.num_swapped,
            swap_bytes=kv.num_swapped_tokens * self._kv_bytes_per_token,
            swaps_total=scheduler.num_swaps,
            recomputes_total=scheduler.num_preemptions - scheduler.num_swaps,
            kv_waste=self._kv_waste,
            step_ms=cost.decode_s(max(1, scheduler.num_running)) * 1e3,
            prefill_tokens_per_s=cost.prefill_tokens_per_s,
        )

    # ---- on the engine thread

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> None:
        """One schedule, execute, update."""
        self._end_late()
        step = self._scheduler.schedule()
        try:
            result = self._runner.execute(step)
        except KvMismatch as mismatch:
            logger.warning("%s; it is computed without the prefix cache", mismatch)
            self._scheduler.drop_shared(mismatch.sequence)
            return
        outputs = self._scheduler.update(result)
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_WASTE == 0:
            self._kv_waste = self._kv.waste()
        if outputs:
            self._hand_out(outputs)
        for failed in result.failed:
            self._fail(failed)

    def idle(self) -> None:
        """Nothing to do for a while: the accounting must agree with itself and with llama.cpp.

        Raises AssertionError when it does not; the engine process then ends and a new one is started.
        """
        self._runner.execute(SchedulerOutput(self._kv.take_operations(), ()))
        self._scheduler.check_integrity()
        self._runner.check_integrity(self._kv.held())

    def _end_late(self) -> None:
        for sequence in self._scheduler.expire():
            request = sequence.request
            self._runner.forget(sequence)
            allowed_s = request.deadline_s - request.arrival_s
            error = DeadlineExceeded(
                f"the answer was not complete within the {allowed_s:.3g} s that the request allowed; "
                "ask for fewer tokens or allow more time",
                deadline_s=allowed_s,
            )
            self._reply(Failed.of(request.request_id, error))

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
        self._scheduler.fail(failed.sequence)
        self._runner.forget(failed.sequence)
        self._reply(Failed.of(request_id, failed.error))

    def _hand_out(self, outputs: list[SequenceOutput]) -> None:
        messages = []
        for output in outputs:
            self._num_generated += len(output.token_ids)
            request_id = output.sequence.request.request_id
            cached = output.sequence.num_cached
            messages.append(TokenOutput(request_id, list(output.token_ids), cached, output.finish_reason))
            if output.finish_reason is not None:
                self._runner.forget(output.sequence)
        self._reply(Tokens(outputs=messages))

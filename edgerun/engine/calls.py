"""What waits for the engine's answer: one-shot calls and streaming generations. On the event loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from edgerun.engine.messages import (
    Accepted,
    Failed,
    FromEngine,
    Progress,
    RequestMessage,
    Submit,
    TokenOutput,
)
from edgerun.errors import DeadlineExceeded, EdgerunError, EngineLost

logger = logging.getLogger(__name__)

_MAX_ENGINES = 2  # that a request is sent to: what ends two engines would end the third as well


class Call:
    """A request with one answer. `can_retry`: it may be sent again to a new engine."""

    def __init__(
        self,
        message: RequestMessage,
        *,
        can_retry: bool,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.message, self._can_retry = message, can_retry
        self._num_sent = 0
        self._on_progress = on_progress
        self.answer: asyncio.Future[FromEngine] = asyncio.get_running_loop().create_future()

    def take(self, message: FromEngine) -> bool:
        """Feed one message of this request; True when it was the final one."""
        if isinstance(message, Progress):
            self._report(message)
            return False
        if self.answer.done():  # whoever waited was cancelled
            return True
        if isinstance(message, Failed):
            self.answer.set_exception(message.error())
        else:
            self.answer.set_result(message)
        return True

    def _report(self, progress: Progress) -> None:
        if self._on_progress is None or self.is_abandoned:
            return
        try:
            self._on_progress(progress)
        except Exception:  # the caller's code must not end the reader, on which every request depends
            logger.exception("a progress callback failed")

    def fail(self, error: EdgerunError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    @property
    def is_abandoned(self) -> bool:
        return self.answer.done()

    def next_message(self) -> RequestMessage:
        """To be sent to an engine now."""
        self._num_sent += 1
        return self.message

    @property
    def may_resubmit(self) -> bool:
        return self._can_retry and self._num_sent < _MAX_ENGINES


class Generation:
    """The tokens of one accepted request: iterate; the last output has a finish_reason.

    Raises what the engine reported, or EngineLost when it died in mid-stream.
    """

    def __init__(
        self, message: Submit, send_abort: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.message = message
        self._send_abort = send_abort
        self._clock, self._arrived_s = clock, clock()
        self._num_sent = 0
        self._outputs: asyncio.Queue[TokenOutput | EdgerunError] = asyncio.Queue()
        self.accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._has_output = self._is_over = self._is_cancelled = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.accepted.result()

    def cancel(self) -> None:
        """Free its work in the engine within a step. Idempotent, and safe after the end."""
        if not self._is_over and not self._is_cancelled:
            self._is_cancelled = True
            self._send_abort(self.message.request_id)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TokenOutput:
        if self._is_over and self._outputs.empty():
            raise StopAsyncIteration
        output = await self._outputs.get()
        if isinstance(output, EdgerunError):
            raise output
        return output

    def take_all(self) -> list[TokenOutput]:
        """What has arrived and was not read yet, without waiting: a slow reader catches up in one write."""
        waiting: list[TokenOutput] = []
        while not self._outputs.empty():
            output = self._outputs.get_nowait()
            if isinstance(output, EdgerunError):
                self._outputs.put_nowait(output)
                break
            waiting.append(output)
        return waiting

    # ---- fed by the client

    def take(self, message: FromEngine) -> bool:
        if isinstance(message, Accepted):
            if not self.accepted.done():
                self.accepted.set_result(message.num_prompt_tokens)
            return False
        if isinstance(message, Failed):
            self.fail(message.error())
        return True

    def take_output(self, output: TokenOutput) -> bool:
        """True when it was the last one."""
        self._has_output = True
        self._is_over = output.finish_reason is not None
        if self._is_over and not self.accepted.done():
            self.accepted.cancel()  # aborted before it was accepted: whoever waited has gone
        self._outputs.put_nowait(output)
        return self._is_over

    def fail(self, error: EdgerunError) -> None:
        self._is_over = True
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # the one who waits may be gone: not an unhandled error
        self._outputs.put_nowait(error)

    @property
    def is_abandoned(self) -> bool:
        return self._is_cancelled or self.accepted.cancelled()

    def next_message(self) -> Submit:
        """To be sent to an engine now: its deadline goes on counting from its arrival.

        Raises DeadlineExceeded.
        """
        self._num_sent += 1
        prompt = self.message.prompt
        if not prompt.deadline_s:
            return self.message
        left_s = prompt.deadline_s - (self._clock() - self._arrived_s)
        if left_s <= 0:
            raise DeadlineExceeded(
                f"the request was to be done within {prompt.deadline_s:.3g} s, but the engine was being "
                "restarted; try again",
                deadline_s=prompt.deadline_s,
            )
        prompt = msgspec.structs.replace(prompt, deadline_s=left_s)
        return msgspec.structs.replace(self.message, prompt=prompt)

    @property
    def may_resubmit(self) -> bool:
        """Nothing was shown of it yet, and it has not ended two engines."""
        return not self._has_output and self._num_sent < _MAX_ENGINES


def engine_lost(how: str) -> EngineLost:
    """how: "died", or what else the engine process did."""
    return EngineLost(
        f"the engine process {how} while it worked on this request; it is being restarted, try again"
    )

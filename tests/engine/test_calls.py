from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from edgerun.engine.calls import Call, Generation
from edgerun.engine.messages import Infer, Submit, TokenOutput
from edgerun.errors import DeadlineExceeded
from edgerun.text.prompt import Prompt


def generation() -> Generation:
    message = Submit(request_id=1, model="m", prompt=Prompt(token_ids=(5,)))
    return Generation(message, lambda request_id: None)


def on_a_loop(body: Callable[[], None]) -> None:
    async def main() -> None:
        body()

    asyncio.run(main())


def test_a_generation_goes_to_two_engines_at_most_and_only_while_nothing_was_shown() -> None:
    def body() -> None:
        request = generation()
        assert request.next_message() is request.message
        assert request.may_resubmit
        request.next_message()
        assert not request.may_resubmit
        shown = generation()
        shown.next_message()
        shown.take_output(TokenOutput(1, [3], 0))
        assert not shown.may_resubmit

    on_a_loop(body)


def test_an_engine_that_never_got_the_request_does_not_count() -> None:
    def body() -> None:
        request = Call(Infer(request_id=1, model="m", data=b"", shape=(), dtype="uint8"), can_retry=True)
        request.next_message()
        for _ in range(5):  # engines that died while they loaded the models
            assert request.may_resubmit
        request.next_message()
        assert not request.may_resubmit

    on_a_loop(body)


def test_a_deadline_counts_from_the_arrival_not_from_the_new_engine() -> None:
    def body() -> None:
        now_s = 1000.0
        prompt = Prompt(token_ids=(5,), deadline_s=10)
        message = Submit(request_id=1, model="m", prompt=prompt)
        request = Generation(message, lambda request_id: None, lambda: now_s)
        assert request.next_message().prompt.deadline_s == 10
        now_s += 7
        assert request.next_message().prompt.deadline_s == 3
        now_s += 3
        with pytest.raises(DeadlineExceeded, match="within 10 s"):
            request.next_message()

    on_a_loop(body)

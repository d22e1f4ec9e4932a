from __future__ import annotations

import queue
import threading

import pytest

from edgerun.llm.loop import EngineLoop


class Counter:
    """Has a number of steps to do."""

    def __init__(self, name: str, num_steps: int, log: list[str]) -> None:
        self.name, self.left, self.log = name, num_steps, log
        self.is_done = threading.Event()

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        self.left -= 1
        self.log.append(self.name)
        if not self.left:
            self.is_done.set()


def start_loop() -> EngineLoop:
    loop = EngineLoop(lambda error: None)
    loop.start()
    return loop


def test_models_take_turns_step_by_step() -> None:
    log: list[str] = []
    a, b = Counter("a", 3, log), Counter("b", 5, log)
    loop = start_loop()
    loop.call(lambda: (loop.add(a), loop.add(b)))
    assert a.is_done.wait(10)
    assert b.is_done.wait(10)
    loop.stop()
    assert log == ["a", "b", "a", "b", "a", "b", "b", "b"]


def test_a_removed_model_is_not_stepped_again() -> None:
    log: list[str] = []
    endless = Counter("a", 10**9, log)
    loop = start_loop()
    loop.call(lambda: loop.add(endless))
    loop.call(lambda: loop.remove(endless))
    count = len(log)
    loop.call(lambda: None)
    loop.stop()
    assert len(log) == count


def test_call_returns_and_raises_what_the_function_does_on_the_engine_thread() -> None:
    loop = start_loop()
    assert loop.call(lambda: threading.current_thread().name) == "llm-engine"
    with pytest.raises(KeyError):
        loop.call(lambda: {}["x"])
    assert loop.call(lambda: 5) == 5
    loop.stop()


def test_an_exception_in_a_step_is_fatal_not_silent() -> None:
    class Broken(Counter):
        def step(self) -> None:
            raise RuntimeError("llama_decode returned -3")

    fatal: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    loop = EngineLoop(fatal.put)
    loop.start()
    loop.put(lambda: loop.add(Broken("x", 1, [])))
    assert str(fatal.get(timeout=10)) == "llama_decode returned -3"
    loop.stop()

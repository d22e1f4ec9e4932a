from __future__ import annotations

import queue
import threading
import time

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

    def idle(self) -> None:
        self.log.append(f"{self.name} is idle")


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


class Gate(Counter):
    """Its step lasts until it is let go."""

    def __init__(self) -> None:
        super().__init__("gate", 1, [])
        self.has_begun, self.may_go = threading.Event(), threading.Event()

    def step(self) -> None:
        self.has_begun.set()
        assert self.may_go.wait(10)
        super().step()


def test_the_age_of_a_step_that_does_not_end_rises_until_it_ends() -> None:
    loop, gate = start_loop(), Gate()
    assert loop.step_age_s == 0
    loop.put(lambda: loop.add(gate))
    assert gate.has_begun.wait(10)
    first_s = loop.step_age_s
    time.sleep(0.02)
    assert loop.step_age_s >= first_s + 0.02 > 0.02
    gate.may_go.set()
    assert gate.is_done.wait(10)
    loop.call(lambda: None)  # behind the step
    assert loop.step_age_s == 0
    loop.stop()


def test_a_stuck_command_has_an_age_and_a_long_call_has_none() -> None:
    loop, gate = start_loop(), Gate()
    caller = threading.Thread(target=loop.call, args=(gate.step,))  # a warm-up, which may take minutes
    caller.start()
    assert gate.has_begun.wait(10)
    time.sleep(0.01)
    assert loop.step_age_s == 0
    gate.may_go.set()
    caller.join()
    stuck = Gate()
    loop.put(stuck.step)
    assert stuck.has_begun.wait(10)
    time.sleep(0.01)
    assert loop.step_age_s > 0
    stuck.may_go.set()
    loop.stop()


def test_steppers_are_told_once_when_the_work_is_over() -> None:
    log: list[str] = []
    loop = EngineLoop(lambda error: None, idle_after_s=0.01)
    loop.start()
    busy, other = Counter("a", 2, log), Counter("b", 0, log)
    loop.call(lambda: (loop.add(busy), loop.add(other)))
    assert busy.is_done.wait(10)
    time.sleep(0.1)
    loop.call(lambda: None)  # no work
    time.sleep(0.1)
    loop.call(lambda: log.append("again"))
    loop.call(lambda: setattr(other, "left", 1))
    assert other.is_done.wait(10)
    time.sleep(0.1)
    loop.stop()
    assert log == ["a", "a", "a is idle", "b is idle", "again", "b", "a is idle", "b is idle"]


def test_a_failed_check_is_fatal_as_a_failed_step_is() -> None:
    class Leaky(Counter):
        def idle(self) -> None:
            raise AssertionError("3 cells belong to nobody")

    fatal: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    loop = EngineLoop(fatal.put, idle_after_s=0.01)
    loop.start()
    loop.put(lambda: loop.add(Leaky("x", 1, [])))
    assert str(fatal.get(timeout=10)) == "3 cells belong to nobody"
    loop.stop()

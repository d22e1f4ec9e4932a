"""Whether one engine process still answers: the rules, without a clock or a process.

Two ways of being stuck are seen. A process that is stopped, or whose interpreter is held, answers no ping:
its main thread never waits for a model. A step or a load that never ends is told by the pongs. A vision call
or a tokenizer that never ends is not noticed: it has a thread of its own and holds up that one model alone.
"""

from __future__ import annotations

from typing import Final

from edgerun.engine.messages import Pong

_INTERVAL_S: Final = 1.0
# Memory that is swapped to a slow card can keep even an idle thread from answering for some seconds.
_MAX_SILENCE_S: Final = 30.0
_MAX_LOAD_S: Final = 1800.0  # 40 GB from a slow disk; the first touch of the weights counts too
_SUSPICIOUS_SILENCE_S: Final = 3.0


class Watch:
    """The owner calls `turn` every interval_s, sends a Ping when it says so, and hands in each Pong.

    Silence is counted in turns, not by a clock, and too long a step must be told twice: when the server
    itself was held up, or both were frozen, the engine gets its chance to answer before it is blamed. The
    verdict is there when the limit is reached, not some turns later.
    """

    def __init__(self, step_timeout_s: float) -> None:
        """step_timeout_s: of one step; the other limits are derived from it."""
        self._max_silence_s = min(_MAX_SILENCE_S, step_timeout_s)
        self.interval_s = min(_INTERVAL_S, self._max_silence_s / 4)
        self._max_step_s = step_timeout_s - 2 * self.interval_s  # two more pongs follow
        self._max_load_s = max(_MAX_LOAD_S, self._max_step_s)
        self._silence_s = 0.0  # since the last Pong
        self._is_asked = False
        self._last = Pong(step_age_s=0.0, load_age_s=0.0)
        self._num_overdue = 0  # pongs in a row that told of too long a step or load

    def turn(self) -> bool:
        """One interval has gone by. True: send a Ping."""
        self._silence_s += self.interval_s
        was_asked, self._is_asked = self._is_asked, True
        return not was_asked

    def take(self, pong: Pong) -> None:
        if self.verdict:
            return  # it is being killed: what it still said changes nothing
        self._is_asked, self._silence_s, self._last = False, 0.0, pong
        is_overdue = pong.step_age_s > self._max_step_s or pong.load_age_s > self._max_load_s
        self._num_overdue = self._num_overdue + 1 if is_overdue else 0

    @property
    def verdict(self) -> str:
        """What is wrong with an engine that must be replaced; "" while it need not be."""
        if self._silence_s >= self._max_silence_s:
            return f"no sign of life for {self._silence_s:.0f} s"
        if self._num_overdue < 2:
            return ""
        if self._last.step_age_s > self._max_step_s:
            return f"one step has taken {self._last.step_age_s:.3g} s"
        return f"one load has taken {self._last.load_age_s:.0f} s"

    @property
    def trouble(self) -> str:
        """Why a request that comes now may wait long; "" when all is well."""
        if self.verdict:
            return f"the engine is stuck: {self.verdict}"
        if self._silence_s >= min(_SUSPICIOUS_SILENCE_S, self._max_silence_s / 2):
            return f"the engine has not answered for {self._silence_s:.0f} s"
        if self._last.step_age_s > self._max_step_s / 4:
            return f"the engine has been in one step for {self._last.step_age_s:.0f} s"
        return ""

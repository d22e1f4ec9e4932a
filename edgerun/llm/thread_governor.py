"""How many threads compute now: all of them, or fewer while other programs use the cores. Pure Python.

Threads of ggml wait for each other hundreds of times in a token. Beside one busy program two threads on two
cores took five times as long as on an idle machine, and one thread twice (tests/benchmarks/RESULTS.md). Which
is better changes as other programs come and go, so the other number is tried for two steps now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEW_SHARE = 0.2
_JUMP = 2.0  # steps this much longer than usual mean that something else runs
_JUMPS_TO_TRY = 3
_TRIED_STEPS = 3  # the first one is not counted: the threads have to come or go
_MIN_GAIN = 0.8  # of the usual time; less is no reason to change
_STEPS_WITH_FEWER = 64  # after so many the full number is tried again
_LONE_STEPS_WITH_ALL = 512  # a lone stream can spare two slow steps: a start on a busy machine is found so


@dataclass(slots=True)
class _Trial:
    num_decodes: int
    usual_s: float
    num_steps: int = 0
    total_s: float = 0.0


class ThreadGovernor:
    """Owned by the engine thread. Knows decode steps alone: prompts follow."""

    def __init__(self, num_threads: int) -> None:
        self._choices = (num_threads, max(1, num_threads // 2))
        self._is_full = True
        self._usual_s: dict[int, float] = {}  # by the number of decodes, with the number of threads in use
        self._num_jumps = self._num_steps = 0
        self._trial: _Trial | None = None

    @property
    def num_threads(self) -> int:
        """For the next step."""
        is_full = self._is_full if self._trial is None else not self._is_full
        return self._choices[0 if is_full else 1]

    def see(self, num_decodes: int, duration_s: float) -> None:
        """One step of decodes took so long."""
        if self._choices[0] == self._choices[1]:
            return
        if self._trial is not None:
            self._see_trial(self._trial, num_decodes, duration_s)
            return
        self._num_steps += 1
        usual_s = self._usual_s.get(num_decodes)
        if usual_s is None:
            self._usual_s[num_decodes] = duration_s
            return
        if duration_s > _JUMP * usual_s:
            self._num_jumps += 1
        else:
            self._num_jumps = 0
            self._usual_s[num_decodes] = usual_s + _NEW_SHARE * (duration_s - usual_s)
        if self._num_jumps >= _JUMPS_TO_TRY:
            self._usual_s = {num_decodes: duration_s}
            self._begin(num_decodes)
        elif self._is_time(num_decodes):
            self._begin(num_decodes)

    def _is_time(self, num_decodes: int) -> bool:
        if self._is_full:
            return num_decodes == 1 and self._num_steps >= _LONE_STEPS_WITH_ALL
        return self._num_steps >= _STEPS_WITH_FEWER

    def _begin(self, num_decodes: int) -> None:
        self._num_jumps = self._num_steps = 0
        self._trial = _Trial(num_decodes, self._usual_s[num_decodes])

    def _see_trial(self, trial: _Trial, num_decodes: int, duration_s: float) -> None:
        if num_decodes != trial.num_decodes:  # nothing to compare with
            self._trial = None
            return
        trial.num_steps += 1
        if trial.num_steps == 1:
            return
        trial.total_s += duration_s
        if trial.num_steps < _TRIED_STEPS:
            return
        self._trial = None
        if trial.total_s / (_TRIED_STEPS - 1) < _MIN_GAIN * trial.usual_s:
            self._is_full = not self._is_full
            self._usual_s.clear()

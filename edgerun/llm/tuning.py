"""Which layout of the KV cache, kernels and threads are fastest for this model on this device: measured.

A few seconds at the first load, in the child that tries the model; what came out is remembered (see
engine/check.py). On a CPU the right choice is worth up to 3.5 times. Only what is correct under all
circumstances is tried: a pool without flash attention is not, since its output depends on where cells lie.

The clock on the wall tells the truth on an otherwise idle machine alone: beside a busy program two threads
can take five times as long. There layouts are compared by CPU time, which misses only how badly the work
divides, and numbers of threads not at all. On a GPU there is the wall alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import psutil

from edgerun.engine.messages import LlmTuning
from edgerun.errors import ModelLoadFailed
from edgerun.llm.llama_api import DECODE_OK, STREAM_MULTIPLE, ContextSettings, LlamaContext, LlamaModel
from edgerun.llm.resolving import Facts, may_be_streams
from edgerun.repository.spec import LlmSettings

logger = logging.getLogger(__name__)

BUDGET_S = 6.0  # about, for everything, and twice that on a busy machine; the user waits for the first load
_LAYOUTS_SHARE = 0.7  # of the budget; the rest is for the threads
_MAX_STREAMS = 8
_CHUNK = 64  # tokens of a prompt that are computed at once: enough for the kernels of long ones
# Tokens of context: the longest that is quick enough. Layouts differ in attention, which grows with it.
_PROMPTS = (320, 192, 128, 64)
_PACE_TOKENS = 32
_MAX_PROMPT_S = BUDGET_S / 4
# Candidates take turns, and of each the fastest round counts: what else runs on the machine only adds time,
# and comes and goes.
_MAX_ROUNDS, _STEPS_A_ROUND = 4, 2
_MIN_GAIN = 0.05  # less than this may be noise, and the default is the better known way
_MIN_GAIN_OF_FEWER_THREADS = 0.15  # a busy machine makes them look better than they are
_MAX_OTHER_LOAD = 0.2  # cores
_KV_SHARE_OF_FREE = 0.25  # as in resolving


@dataclass(frozen=True, slots=True)
class Candidate:
    layout: Literal["unified", "streams"]
    flash_attention: bool
    num_threads: int

    def __str__(self) -> str:
        flash = "on" if self.flash_attention else "off"
        return f"{self.layout}, flash attention {flash}, {self.num_threads} threads"


@dataclass(frozen=True, slots=True)
class Trial:
    """lone_s: a step of one stream. crowd_s: a step of num_streams streams. prompt_s: a token of a prompt."""

    candidate: Candidate
    num_streams: int
    lone_s: float
    crowd_s: float
    prompt_s: float

    def relative_to(self, other: Trial) -> float:
        """Its time in units of the other's: the geometric mean of the three ratios, since none of a lone
        chat, a crowd and a long prompt is known to matter more, and a mean of seconds would be the prompt's
        or the crowd's alone."""
        pairs = (
            (self.lone_s, other.lone_s),
            (self.crowd_s, other.crowd_s),
            (self.prompt_s, other.prompt_s),
        )
        return math.exp(sum(math.log(mine / its) for mine, its in pairs) / len(pairs))

    def __str__(self) -> str:
        crowd = f", {self.num_streams} streams {self.crowd_s * 1e3:.1f} ms" if self.num_streams > 1 else ""
        return (
            f"{self.candidate}: 1 stream {self.lone_s * 1e3:.1f} ms a step{crowd}, "
            f"prompts {1 / self.prompt_s:.0f} tokens/s"
        )


class Probe(Protocol):
    """A context for one layout that can be timed with any number of threads."""

    def run_round(self, num_threads: int) -> None: ...

    def trial(self, num_threads: int, *, by_wall: bool) -> Trial:
        """The fastest of the rounds so far, by the clock on the wall or by CPU time."""
        ...

    def close(self) -> None: ...


class TooSlow(Exception):
    """The model cannot be measured within the budget; says why."""


def layouts(asked: LlmSettings, facts: Facts) -> list[Candidate]:
    """What config.toml leaves open and the memory has room for; the default first."""
    threads = asked.num_threads or facts.num_threads
    if facts.memory_kind == "recurrent":  # it has no cells to lay out, and no attention
        return [Candidate("streams" if asked.kv_layout == "streams" else "unified", True, threads)]
    pairs = [Candidate("unified", True, threads), Candidate("streams", True, threads)]
    if not facts.use_gpu and asked.kv_cache_dtype == "f16":  # a quantised cache needs flash attention
        pairs.insert(
            1, Candidate("streams", False, threads)
        )  # the likeliest to win, so not left out for time
    streams_fit = asked.kv_layout == "streams" or may_be_streams(asked, facts)
    flash = {"on": True, "off": False}.get(asked.flash_attention)
    found = [
        pair
        for pair in pairs
        if (pair.layout == "unified" or streams_fit)
        and asked.kv_layout in ("auto", pair.layout)
        and flash in (None, pair.flash_attention)
    ]
    # What is left is fixed by config.toml: only threads are to choose.
    return found or [Candidate("unified", flash is not False, threads)]


def thread_counts(asked: LlmSettings, facts: Facts) -> list[int]:
    """The default first. Half: where memory is the limit, or cores share caches or are slow ones."""
    if asked.num_threads or facts.use_gpu:
        return [asked.num_threads or facts.num_threads]
    return list(dict.fromkeys([facts.num_threads, max(1, facts.num_threads // 2)]))


def is_open(asked: LlmSettings, facts: Facts) -> bool:
    """Whether there is anything to choose."""
    return len(layouts(asked, facts)) > 1 or len(thread_counts(asked, facts)) > 1


def choose(trials: list[Trial], min_gain: float = _MIN_GAIN) -> Trial:
    """The fastest, if it is clearly faster than the first one, which is the default."""
    default = trials[0]
    best = min(trials, key=lambda trial: trial.relative_to(default))
    return best if best.relative_to(default) <= 1 - min_gain else default


def tune(
    asked: LlmSettings,
    facts: Facts,
    open_probe: Callable[[Candidate], Probe],
    clock: Callable[[], float] = time.perf_counter,
    other_load: Callable[[], float] | None = None,
) -> LlmTuning | None:
    """Try layouts, then threads for the best of them, as far as the budget goes. None: nothing to choose.

    open_probe may raise TooSlow or ModelLoadFailed. other_load: cores that other programs used since the
    start of the measuring.
    """
    if not is_open(asked, facts):
        return None
    started_s = clock()
    other_load = other_load or _OtherLoad()
    candidates, counts = layouts(asked, facts), thread_counts(asked, facts)
    probes: dict[Candidate, Probe] = {}
    notes: list[str] = []
    missed = False
    with ExitStack() as stack:
        for candidate in candidates:
            spent_s = clock() - started_s
            budget_s = BUDGET_S * (2 if other_load() > _MAX_OTHER_LOAD else 1)
            if probes and spent_s * (1 + 1 / len(probes)) > budget_s * _LAYOUTS_SHARE:
                notes.append(f"{candidate}: not tried, for want of time")
                missed = True
                continue
            try:
                probes[candidate] = open_probe(candidate)
                stack.callback(probes[candidate].close)
            except (TooSlow, ModelLoadFailed) as error:
                notes.append(f"{candidate}: not measured, {error}")
                if not probes:  # without the default there is nothing to compare with
                    return _tuning(candidate, notes)
        turns = [(probe, counts[0]) for probe in probes.values()]
        _take_turns(turns, started_s + BUDGET_S * _LAYOUTS_SHARE, clock)
        load = other_load()
        is_busy = load > _MAX_OTHER_LOAD
        by_wall = facts.use_gpu or not is_busy
        trials = [probe.trial(counts[0], by_wall=by_wall) for probe in probes.values()]
        winner = choose(trials)
        of_threads = [winner]
        best = probes[winner.candidate]
        if len(counts) > 1 and is_busy:
            notes.append(f"other numbers of threads: not measured, other programs kept {load:.1f} cores busy")
        elif len(counts) > 1:
            _take_turns([(best, count) for count in counts], started_s + BUDGET_S, clock)
            of_threads = [best.trial(count, by_wall=True) for count in counts]
    others = [trial for trial in trials if trial is not winner]
    winner = choose(of_threads, _MIN_GAIN_OF_FEWER_THREADS)
    others += [trial for trial in of_threads if trial.candidate != winner.candidate]
    others.sort(key=lambda trial: trial.relative_to(winner))
    return _tuning(winner.candidate, [*map(str, (winner, *others)), *notes], was_busy=is_busy or missed)


def _take_turns(turns: list[tuple[Probe, int]], deadline_s: float, clock: Callable[[], float]) -> None:
    """At least one round for each, and no more than the time allows."""
    for _ in range(_MAX_ROUNDS):
        began_s = clock()
        for probe, num_threads in turns:
            probe.run_round(num_threads)
        if 2 * clock() - began_s > deadline_s:  # the next would end after it
            break


def _tuning(candidate: Candidate, trials: list[str], *, was_busy: bool = False) -> LlmTuning:
    return LlmTuning(
        kv_layout=candidate.layout,
        flash_attention=candidate.flash_attention,
        num_threads=candidate.num_threads,
        trials=tuple(trials),
        was_busy=was_busy,
    )


# ---- the measuring

_CpuWall = tuple[float, float]  # seconds of CPU time of each thread on average, and on the wall


class _OtherLoad:
    """Cores that other programs used since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def __call__(self) -> float:
        wall_s, others_s = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(0.0, others_s / max(wall_s, 1e-3))

    @staticmethod
    def _now() -> tuple[float, float]:
        times = psutil.cpu_times()
        busy_s = times.user + times.system + getattr(times, "steal", 0.0)
        return time.perf_counter(), busy_s - time.process_time()


@dataclass(slots=True)
class _Times:
    lone_s: float = math.inf
    crowd_s: float = math.inf
    chunk_s: float = math.inf


class ModelProbe:
    """Times a loaded model. On the thread that computes (see loop.py), and nothing else may run there."""

    def __init__(
        self,
        model: LlamaModel,
        asked: LlmSettings,
        facts: Facts,
        candidate: Candidate,
    ) -> None:
        """Opens a small context and fills it: a prompt, and copies of it as other streams. Raises TooSlow,
        ModelLoadFailed."""
        self._candidate, self._use_gpu = candidate, facts.use_gpu
        self._num_threads = candidate.num_threads
        longest = _PROMPTS[0] + 3 * _MAX_ROUNDS * _STEPS_A_ROUND
        cells = STREAM_MULTIPLE * -(-longest // STREAM_MULTIPLE)
        affordable = int(facts.free_bytes * _KV_SHARE_OF_FREE) // max(1, 3 * cells * facts.kv_bytes_per_token)
        self._num_streams = max(1, min(_MAX_STREAMS, asked.max_num_seqs, affordable))
        # Any tokens will do; the time does not depend on which.
        self._tokens = [3 + 7 * i % max(1, model.num_tokens - 3) for i in range(_PROMPTS[0])]
        self._times: dict[tuple[int, bool], _Times] = defaultdict(_Times)  # by threads, and by wall or CPU
        self._context = LlamaContext(
            model,
            ContextSettings(
                num_kv_tokens=cells * self._num_streams,
                max_batch_tokens=_CHUNK,
                num_seq_ids=self._num_streams,
                num_threads=candidate.num_threads,
                kv_cache_dtype=asked.kv_cache_dtype,
                unified=candidate.layout == "unified",
                flash_attention=candidate.flash_attention,
            ),
        )
        try:
            self._fill()
        except TooSlow:
            self.close()
            raise

    def close(self) -> None:
        self._context.close()

    def _fill(self) -> None:
        self._num_prompt = self._affordable_prompt()
        for start in range(0, self._num_prompt, _CHUNK):
            took_s = self._decode([(0, self._tokens[start : start + _CHUNK], start)])
            if 2 * start >= self._num_prompt - _CHUNK:  # the first ones have little to attend to
                self._note("chunk_s", self._candidate.num_threads, took_s)
        saved = self._context.save_sequence(0)
        for seq_id in range(1, self._num_streams):
            self._context.load_sequence(seq_id, saved)
        self._ends = [self._num_prompt] * self._num_streams

    def _affordable_prompt(self) -> int:
        """Tokens. Raises TooSlow."""
        times_s = []
        for _ in range(2):  # the first one touches the buffers for the first time
            cpu_s, wall_s = self._decode([(0, self._tokens[:_PACE_TOKENS], 0)])
            times_s.append(wall_s if self._use_gpu else cpu_s)
            self._context.remove_sequence(0)
        pace_s = min(times_s) / _PACE_TOKENS
        for num_tokens in _PROMPTS:
            if num_tokens * pace_s <= _MAX_PROMPT_S:
                return num_tokens
        raise TooSlow(f"a token of a prompt takes {pace_s * 1e3:.0f} ms")

    def run_round(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._context.set_num_threads(num_threads)
        if math.isinf(self._times[num_threads, True].chunk_s):
            start = self._num_prompt - _CHUNK
            if self._context.remove_sequence(0, start):  # a recurrent one cannot be cut: it goes on instead
                self._ends[0] = start
            self._note("chunk_s", num_threads, self._decode([(0, self._tokens[:_CHUNK], self._ends[0])]))
            self._ends[0] += _CHUNK
        for _ in range(_STEPS_A_ROUND):
            self._note("lone_s", num_threads, self._step(1))
        for _ in range(_STEPS_A_ROUND):
            self._note("crowd_s", num_threads, self._step(self._num_streams))

    def trial(self, num_threads: int, *, by_wall: bool) -> Trial:
        times = self._times[num_threads, by_wall]
        candidate = replace(self._candidate, num_threads=num_threads)
        return Trial(candidate, self._num_streams, times.lone_s, times.crowd_s, times.chunk_s / _CHUNK)

    def _note(
        self, what: Literal["lone_s", "crowd_s", "chunk_s"], num_threads: int, took_s: _CpuWall
    ) -> None:
        for by_wall, seconds in enumerate(took_s):
            times = self._times[num_threads, bool(by_wall)]
            setattr(times, what, min(getattr(times, what), seconds))

    def _step(self, num_streams: int) -> _CpuWall:
        """Seconds of a step in which each of the first streams gets a token."""
        step = [(i, self._tokens[:1], self._ends[i]) for i in range(num_streams)]
        for i in range(num_streams):
            self._ends[i] += 1
        return self._decode(step)

    def _decode(self, chunks: list[tuple[int, list[int], int]]) -> _CpuWall:
        """Seconds for chunks of (sequence, tokens, start) in one call, up to the logits."""
        batch, last = self._context.batch, 0
        batch.clear()
        for seq_id, tokens, start in chunks:
            last = batch.add(seq_id, tokens, start, wants_logits=True)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        if self._context.decode() != DECODE_OK:
            raise TooSlow("its KV cache had no room")
        self._context.logits(last)  # a GPU computes until here
        took_s = (time.process_time() - cpu_s) / self._num_threads, time.perf_counter() - wall_s
        return max(1e-9, took_s[0]), max(1e-9, took_s[1])

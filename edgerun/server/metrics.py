"""Prometheus metrics under the names that dashboards already know: vLLM's for language, Triton's for vision.

What the server sees itself (tokens, times, answers) it counts itself, so that an engine crash loses
nothing. What only the engine knows comes from its stats; those counters start at zero in each new engine,
so the lives are added up here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgerun.engine.messages import LlmStats, Stats, VisionStats
from edgerun.errors import EdgerunError
from edgerun.server.engine import Engine

_STATS_TIMEOUT_S = 1.0  # a busy engine answers between two steps; a stuck one must not hang the scrape

# Buckets as in vllm/v1/metrics/loggers.py, so that its dashboards' quantiles mean the same here.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

_LLM_GAUGES: Mapping[str, tuple[Callable[[LlmStats], float], str]] = {
    "vllm:num_requests_running": (lambda s: s.num_running, "Requests in the running batch."),
    "vllm:num_requests_waiting": (lambda s: s.num_waiting, "Requests that wait for a place in the batch."),
    "vllm:kv_cache_usage_perc": (
        lambda s: kv_cache_usage(s),  # defined below
        "Share of the KV blocks that running requests hold, 0 to 1; kept prefixes give way and do not count.",
    ),
    "edgerun_kv_parked_sequences": (
        lambda s: s.num_parked,
        "Ended sequences whose KV cells are kept for whoever asks the same.",
    ),
    "edgerun_kv_swapped_sequences": (
        lambda s: s.num_swapped,
        "Preempted sequences whose KV cells are in host memory.",
    ),
    "edgerun_kv_swap_bytes": (lambda s: s.swap_bytes, "Host memory that those take, in bytes."),
    "edgerun_kv_waste_ratio": (
        lambda s: s.kv_waste,
        "Share of the held KV cells that nothing was written to, 0 to 1.",
    ),
    "edgerun_step_decode_seconds": (
        lambda s: s.step_ms / 1e3,
        "What a step with one token for each running request takes, by the last ones.",
    ),
    "edgerun_prefill_tokens_per_second": (
        lambda s: s.prefill_tokens_per_s,
        "Prompt tokens computed in a second, by the last steps; 0 before the first.",
    ),
}
_LLM_COUNTERS = {
    "vllm:prefix_cache_queries": (
        "prefix_cache_queries_total",
        "Prompt tokens looked up in the cache.",
    ),
    "vllm:prefix_cache_hits": ("prefix_cache_hits_total", "Prompt tokens that the cache had."),
    "vllm:num_preemptions": ("preemptions_total", "Times that a running request was put back."),
    "edgerun_kv_swaps": ("swaps_total", "Preemptions that kept the KV cells in host memory."),
    "edgerun_kv_recomputes": (
        "recomputes_total",
        "Preemptions without that: what others need of the KV cells meanwhile is computed again.",
    ),
}
_MISSES = "edgerun_prefix_cache_misses"
_MISSES_TEXT = (
    "Requests whose prompt the cache had not, or not all: new (not seen before), evicted, short (less than a "
    "block) or off."
)
_VISION_COUNTERS = {
    "nv_inference_count": ("inference_count", "Pictures that ran."),
    "nv_inference_exec_count": ("execution_count", "Batches that ran."),
    "nv_inference_queue_duration_us": ("queue_us", "Time that pictures waited for their batch."),
    "nv_inference_compute_infer_duration_us": ("infer_us", "Time that batches ran."),
}


class ServerMetrics:
    """All metrics of one server, in a registry of its own. Used from the event loop only."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        llm = ("model_name",)
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens of accepted requests.", llm, registry=registry
        )
        self.generation_tokens = Counter(
            "vllm:generation_tokens", "Tokens generated for answers.", llm, registry=registry
        )
        self.requests = Counter(
            "vllm:request_success",
            "Requests that ended, by how: stop, length, abort (the client left) or error.",
            ("model_name", "finished_reason"),
            registry=registry,
        )
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            llm,
            buckets=_TTFT_S,
            registry=registry,
        )
        self.inter_token = Histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of one answer.",
            llm,
            buckets=_ITL_S,
            registry=registry,
        )
        self.e2e = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the request's arrival to its end.",
            llm,
            buckets=_E2E_S,
            registry=registry,
        )
        vision = ("model", "version")
        self.pictures_ok = Counter(
            "nv_inference_request_success", "Pictures answered.", vision, registry=registry
        )
        self.pictures_failed = Counter(
            "nv_inference_request_failure",
            "Pictures refused or failed, by reason.",
            (*vision, "reason"),
            registry=registry,
        )
        self._engine_side = EngineCollector()
        registry.register(self._engine_side)

    async def render(self, engine: Engine) -> bytes:
        """The metrics page. Answers within about a second whatever the engine does."""
        stats = await read_stats(engine)
        if stats is None:
            self._engine_side.lost()
        else:
            self._engine_side.update(stats, is_up=not engine.trouble)
        return prometheus_client.generate_latest(self.registry)


async def read_stats(engine: Engine) -> Stats | None:
    """What the engine says of itself; None when it does not within about a second."""
    if engine.state != "ready":  # it would be waited for
        return None
    try:
        return await asyncio.wait_for(engine.stats(), _STATS_TIMEOUT_S)
    except (EdgerunError, asyncio.TimeoutError):
        return None


def kv_cache_usage(stats: LlmStats) -> float:
    """Share of the KV blocks that running sequences hold, 0 to 1."""
    used = stats.num_blocks - stats.num_free_blocks
    return used / stats.num_blocks if stats.num_blocks else 0.0


class GenerationTimer:
    """The times of one generating request, counted into the metrics as they happen."""

    def __init__(self, metrics: ServerMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        # Looking a label up takes as long as counting with it, and there are two for each token.
        self._inter_token = metrics.inter_token.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._arrived_s = self._last_s = time.monotonic()
        self._has_token = False

    def accepted(self, num_prompt_tokens: int) -> None:
        self._metrics.prompt_tokens.labels(self._model).inc(num_prompt_tokens)

    def tokens(self, count: int) -> None:
        """`count` more tokens came in one step."""
        now_s = time.monotonic()
        if not self._has_token:
            self._has_token = True
            self._metrics.ttft.labels(self._model).observe(now_s - self._arrived_s)
        else:
            for _ in range(count):
                self._inter_token.observe((now_s - self._last_s) / count)
        self._generation_tokens.inc(count)
        self._last_s = now_s

    def finished(self, reason: str) -> None:
        self._metrics.requests.labels(self._model, reason).inc()
        self._metrics.e2e.labels(self._model).observe(time.monotonic() - self._arrived_s)


class EngineCollector(Collector):
    """What the engine says of itself; counters add up over the lives of the engine and never fall."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, tuple[str, ...]], _Total] = {}  # (metric, values of its labels)
        self._gauges: dict[tuple[str, str], float] = {}  # (metric, model)
        self._is_up = False

    def update(self, stats: Stats, *, is_up: bool = True) -> None:
        """is_up False: it counts, but one of its steps does not end."""
        self._is_up = is_up
        self._gauges.clear()
        for model, llm in stats.llm.items():
            self._take_llm(model, llm)
        for model, vision in stats.vision.items():
            self._take_vision(model, vision)

    def lost(self) -> None:
        """No answer: what it ran is gone or unknown. The counters stay where they are."""
        self._is_up = False
        self._gauges = dict.fromkeys(self._gauges, 0.0)

    def _take_llm(self, model: str, stats: LlmStats) -> None:
        for name, (read, _) in _LLM_GAUGES.items():
            self._gauges[name, model] = read(stats)
        for name, (field, _) in _LLM_COUNTERS.items():
            self._total(name, model).see(getattr(stats, field))
        # A new engine does not name the reasons that it has not met yet.
        known = [labels[1] for metric, labels in self._totals if metric == _MISSES and labels[0] == model]
        for reason in {*known, *stats.prefix_misses}:
            self._total(_MISSES, model, reason).see(stats.prefix_misses.get(reason, 0))

    def _take_vision(self, model: str, stats: VisionStats) -> None:
        self._gauges["nv_inference_pending_request_count", model] = stats.pending
        for name, (field, _) in _VISION_COUNTERS.items():
            self._total(name, model).see(getattr(stats, field))

    def _total(self, name: str, *labels: str) -> _Total:
        return self._totals.setdefault((name, labels), _Total())

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("edgerun_engine_up", "1 when the engine answers.", value=float(self._is_up))
        gauges = {name: text for name, (_, text) in _LLM_GAUGES.items()}
        gauges["nv_inference_pending_request_count"] = "Pictures waiting or running."
        for name, text in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=(_label(name),))
            for (metric, model), value in self._gauges.items():
                if metric == name:
                    gauge.add_metric((model,), value)
            yield gauge
        for name, (_, text) in {**_LLM_COUNTERS, **_VISION_COUNTERS}.items():
            yield self._counter(name, text, (_label(name),))
        yield self._counter(_MISSES, _MISSES_TEXT, (_label(_MISSES), "reason"))

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=labels)
        for (metric, values), total in self._totals.items():
            if metric == name:
                counter.add_metric(values, total.value)
        return counter


class _Total:
    """One counter over all lives of the engine."""

    def __init__(self) -> None:
        self._before = 0  # what earlier engines counted
        self._last = 0  # what this one said last

    def see(self, value: int) -> None:
        if value < self._last:  # it started again from zero
            self._before += self._last
        self._last = value

    @property
    def value(self) -> int:
        return self._before + self._last


def _label(metric: str) -> str:
    """vLLM, and edgerun with it, labels by model_name, Triton by model."""
    return "model" if metric.startswith("nv_") else "model_name"

"""Prometheus instruments under vLLM's names with the prefix `jaxinfer:`, in a registry of their own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxinfer.types import FinishReason, TokenOutput

_TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_ITL_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
_E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


@dataclass(frozen=True)
class EngineStats:
    """State of the engine after a step; counts without "running" or "waiting" only ever grow.

    Attributes:
      num_running: sequences that hold a slot.
      num_waiting: sequences that wait for one.
      kv_cache_usage: pages that sequences hold, as a fraction of those there are, 0 to 1.
      num_pages: pages of the cache, each group's null page included.
      num_preemptions: sequences that lost their pages and were computed again.
      prefix_cache_queries: prompt tokens looked up in the prefix cache.
      prefix_cache_hits: prompt tokens found there.
      compilations_warmup: programs compiled before the first request.
      compilations_serving: programs compiled since; anything but 0 is a bug.
      num_steps: steps launched.
      num_prefill_tokens: prompt tokens computed.
      num_decode_tokens: decode tokens computed.
      num_padding_tokens: rows computed for nothing, to fill a bucket.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_pages: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    compilations_warmup: int = 0
    compilations_serving: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_padding_tokens: int = 0


class Metrics:
    """What the engine tells of its requests and steps. One thread observes, any thread renders."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._stats = _StatsCollector()
        self._registry.register(self._stats)
        self._seen: dict[str, _Seen] = {}
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens.", _ITL_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _E2E_BUCKETS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        success = self._counter("request_success", "Completions that ended, by reason.", ("finished_reason",))
        # Each reason is exported from the start, at 0, so that rates are right from the first one on.
        self._success = {reason: success.labels(reason.value) for reason in FinishReason}

        self._memory = Gauge(
            "jaxinfer:memory_bytes", "Allocated on a device, by class.", ("class",), registry=self._registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jaxinfer:{name}", text, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"jaxinfer:{name}", text, labels, registry=self._registry)

    def observe_output(self, output: TokenOutput, num_prompt_tokens: int) -> None:
        """Counts the tokens and times of one output; every output of a request, in order."""
        now_s = time.monotonic()
        seen = self._seen.get(output.request_id)
        if seen is None:
            seen = self._seen[output.request_id] = _Seen()
            self._prompt_tokens.inc(num_prompt_tokens)
        if output.token_ids:
            self._observe_tokens(seen, output, now_s)
        if output.finish_reason is not None:
            self._success[output.finish_reason].inc()
        if output.request_finished:
            self._e2e.observe(now_s - output.metrics.arrival_time_s)
            del self._seen[output.request_id]

    def _observe_tokens(self, seen: _Seen, output: TokenOutput, now_s: float) -> None:
        num_tokens = len(output.token_ids)
        self._generation_tokens.inc(num_tokens)
        last_s = seen.last_token_s.get(output.index)
        seen.last_token_s[output.index] = now_s
        if last_s is not None:
            for _ in range(num_tokens):
                self._itl.observe((now_s - last_s) / num_tokens)
        elif len(seen.last_token_s) == 1:
            self._ttft.observe(now_s - output.metrics.arrival_time_s)

    def observe_abort(self, request_id: str) -> None:
        """Counts a request that was cancelled before its end and forgets its times."""
        self._seen.pop(request_id, None)
        self._success[FinishReason.ABORT].inc()

    def observe_step(self, stats: EngineStats) -> None:
        """Takes the engine's state; costs an assignment, since `render` does the rest."""
        self._stats.latest = stats

    def observe_memory(self, bytes_by_class: Mapping[str, int]) -> None:
        """Takes what is allocated on a device."""
        for name, size in bytes_by_class.items():
            self._memory.labels(name).set(size)

    def render(self) -> bytes:
        """The text exposition, of `content_type`."""
        return generate_latest(self._registry)


@dataclass
class _Seen:
    """When each completion of a request had its last token, in seconds of time.monotonic()."""

    last_token_s: dict[int, float] = field(default_factory=dict)


class _StatsCollector(Collector):
    """Renders the latest EngineStats when it is asked, so that a step pays nothing for it."""

    def __init__(self) -> None:
        self.latest = EngineStats()

    def collect(self) -> Iterator[Metric]:
        stats = self.latest
        gauges: Iterable[tuple[str, str, float]] = (
            ("num_requests_running", "Sequences that hold a slot.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait for a slot.", stats.num_waiting),
            ("kv_cache_usage_perc", "Pages in use; 1 is all of them.", stats.kv_cache_usage),
        )
        counters: Iterable[tuple[str, str, int]] = (
            ("num_preemptions", "Sequences preempted.", stats.num_preemptions),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("padding_tokens", "Rows computed only to fill a bucket.", stats.num_padding_tokens),
            ("engine_steps", "Steps of the engine.", stats.num_steps),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"jaxinfer:{name}", text, value=value)
        for name, text, value in counters:
            yield CounterMetricFamily(f"jaxinfer:{name}", text, value=value)
        compilations = CounterMetricFamily("jaxinfer:compilations", "Programs compiled.", labels=("phase",))
        compilations.add_metric(("warmup",), stats.compilations_warmup)
        compilations.add_metric(("serving",), stats.compilations_serving)
        yield compilations

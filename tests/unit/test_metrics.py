from __future__ import annotations

import dataclasses
import time

from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.metrics import EngineStats, Metrics
from jaxinfer.types import FinishReason, RequestMetrics, TokenOutput


def samples(metrics: Metrics) -> dict[str, float]:
    """Sample name, with its one label's value where it has one -> value."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {"/".join([s.name, *s.labels.values()]): s.value for f in families for s in f.samples}


def output(
    tokens: int, index: int = 0, reason: FinishReason | None = None, finished: bool = False
) -> TokenOutput:
    metrics = RequestMetrics(arrival_time_s=time.monotonic() - 3.0)
    return TokenOutput("r", index, "", (7,) * tokens, (), reason, None, metrics, request_finished=finished)


def test_a_request_is_counted_once_whatever_its_number_of_completions() -> None:
    metrics = Metrics()
    metrics.observe_output(output(1), num_prompt_tokens=5)
    metrics.observe_output(output(1, index=1), num_prompt_tokens=5)
    metrics.observe_output(output(2), num_prompt_tokens=5)
    metrics.observe_output(output(1, reason=FinishReason.STOP), num_prompt_tokens=5)
    metrics.observe_output(output(0, 1, FinishReason.LENGTH, finished=True), num_prompt_tokens=5)
    got = samples(metrics)
    assert got["jaxinfer:prompt_tokens_total"] == 5
    assert got["jaxinfer:generation_tokens_total"] == 5
    assert got["jaxinfer:time_to_first_token_seconds_count"] == 1
    assert 3 <= got["jaxinfer:time_to_first_token_seconds_sum"] < 4
    assert got["jaxinfer:inter_token_latency_seconds_count"] == 3  # two and one of index 0
    assert got["jaxinfer:e2e_request_latency_seconds_count"] == 1
    assert got["jaxinfer:request_success_total/stop"] == 1
    assert got["jaxinfer:request_success_total/length"] == 1
    assert got["jaxinfer:request_success_total/abort"] == 0


def test_an_aborted_request_leaves_nothing_behind() -> None:
    metrics = Metrics()
    metrics.observe_output(output(1), num_prompt_tokens=5)
    metrics.observe_abort("r")
    metrics.observe_output(output(1), num_prompt_tokens=5)  # the id again is a new request
    got = samples(metrics)
    assert got["jaxinfer:request_success_total/abort"] == 1
    assert got["jaxinfer:prompt_tokens_total"] == 10
    assert got["jaxinfer:time_to_first_token_seconds_count"] == 2


def test_every_field_of_the_stats_is_told_apart() -> None:
    metrics = Metrics()
    numbers = {f.name: i for i, f in enumerate(dataclasses.fields(EngineStats), 1)}
    metrics.observe_step(EngineStats(**numbers))
    got = samples(metrics)
    names = {
        "jaxinfer:num_requests_running": "num_running",
        "jaxinfer:num_requests_waiting": "num_waiting",
        "jaxinfer:kv_cache_usage_perc": "kv_cache_usage",
        "jaxinfer:num_preemptions_total": "num_preemptions",
        "jaxinfer:prefix_cache_queries_total": "prefix_cache_queries",
        "jaxinfer:prefix_cache_hits_total": "prefix_cache_hits",
        "jaxinfer:compilations_total/warmup": "compilations_warmup",
        "jaxinfer:compilations_total/serving": "compilations_serving",
        "jaxinfer:padding_tokens_total": "num_padding_tokens",
    }
    assert {name: got[name] for name in names} == {name: numbers[field] for name, field in names.items()}


def test_two_engines_in_one_process_do_not_share_a_registry() -> None:
    one, other = Metrics(), Metrics()
    one.observe_output(output(1), num_prompt_tokens=5)
    assert samples(other)["jaxinfer:prompt_tokens_total"] == 0

"""The benchmark's arithmetic, over an engine whose steps take a known time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from jaxinfer import bench
from jaxinfer.types import Request, RequestMetrics, TokenOutput

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Engine

STEP_S = 0.25  # exact in binary, so that the figures are too
HOST_S = 0.0005


class SteadyEngine:
    """Gives each request a token a step, after `prefill_steps` steps without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefill_steps: int = 0, tokens_lost: int = 0) -> None:
        self.now_s = 0.0
        self.prefill_steps = prefill_steps
        self.tokens_lost = tokens_lost
        self.host_times_s: list[float] = []
        self.model_config = SimpleNamespace(vocab_size=1000)
        self.num_steps = 0
        self.prompts: list[tuple[int, ...]] = []
        self._left: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def add_request(self, request: Request) -> None:
        assert request.params.temperature == 0.0
        assert request.params.ignore_eos
        assert request.params.max_tokens is not None
        self.prompts.append(request.prompt_token_ids)
        self._left[request.request_id] = request.params.max_tokens - self.tokens_lost
        self._waiting[request.request_id] = self.prefill_steps

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(num_steps=self.num_steps)

    def has_unfinished(self) -> bool:
        return any(self._left.values())

    def step(self) -> list[TokenOutput]:
        self.now_s += STEP_S
        self.num_steps += 1
        self.host_times_s.append(HOST_S)
        outputs = []
        for request_id, left in self._left.items():
            if self._waiting[request_id]:
                self._waiting[request_id] -= 1
            elif left:
                self._left[request_id] -= 1
                outputs.append(TokenOutput(request_id, 0, "", (1,), (), None, None, RequestMetrics(0.0)))
        return outputs


def test_throughput_counts_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SteadyEngine(monkeypatch, prefill_steps=2)
    figures = bench.throughput(cast("Engine", engine), num_prompts=4, input_len=6, output_len=10, seed=0)
    duration_s = (2 + 10) * STEP_S
    assert figures["duration_s"] == duration_s
    assert figures["num_steps"] == 12
    assert figures["output_tok_per_s"] == 4 * 10 / duration_s
    assert figures["total_tok_per_s"] == 4 * (6 + 10) / duration_s
    assert figures["ttft_ms"]["p50"] == 3 * STEP_S * 1e3
    assert figures["itl_ms"]["p99"] == STEP_S * 1e3
    assert figures["host_time_between_steps_ms"]["p50"] == pytest.approx(0.5)


def test_latency_takes_the_first_token_out_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SteadyEngine(monkeypatch, prefill_steps=3)
    figures = bench.latency(cast("Engine", engine), input_len=6, output_len=10, num_repeats=3, seed=0)
    assert figures["decode_tok_per_s"] == 1 / STEP_S
    assert figures["prefill_512_tok_per_s"] == 512 / (4 * STEP_S)


def test_no_prompt_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated prompt would be found in the prefix cache and make prefill look fast."""
    engine = SteadyEngine(monkeypatch)
    bench.latency(cast("Engine", engine), input_len=128, output_len=2, num_repeats=3, seed=0)
    starts = [prompt[:16] for prompt in engine.prompts]
    assert len(set(starts)) == len(starts)


def test_a_request_that_gets_too_few_tokens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SteadyEngine(monkeypatch, tokens_lost=1)
    with pytest.raises(RuntimeError, match="did not get 10 tokens"):
        bench.run(cast("Engine", engine), [(1, 2, 3)], 10)

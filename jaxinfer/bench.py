"""Measures: `python -m jaxinfer.bench throughput|latency|host --model=demo`.

Prompts are random token ids from `--seed`, decoding is greedy and ignores the end of sequence, so
that every run does the same work.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer import cli
from jaxinfer.flags import BenchOptions, bench_options
from jaxinfer.types import Request, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Engine

MEASUREMENTS = ("throughput", "latency", "host")
WARM_UP_TOKENS = 4
PREFILL_LEN = 512  # tokens of the prompt whose prefill `latency` measures


@dataclass
class Timeline:
    """Points in time.monotonic() seconds at which the tokens of one request came."""

    arrival_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Arrival to first token, time in the queue included."""
        return self.tokens_s[0] - self.arrival_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between one token and the next."""
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


@dataclass
class Run:
    """What one pass over a set of prompts measured."""

    duration_s: float
    num_steps: int
    timelines: list[Timeline]
    host_times_s: list[float]


def random_prompts(num_prompts: int, length: int, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """`num_prompts` prompts of `length` ids below `vocab_size`, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return [tuple(row) for row in rng.integers(0, vocab_size, (num_prompts, length)).tolist()]


def run(engine: Engine, prompts: Sequence[tuple[int, ...]], output_len: int) -> Run:
    """Adds all prompts at once and steps the engine until each has `output_len` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    engine.host_times_s.clear()
    num_steps = engine.stats().num_steps
    start_s = time.monotonic()
    timelines = {}
    for prompt in prompts:
        request_id = f"bench-{len(timelines)}"
        timelines[request_id] = Timeline(arrival_s=start_s)
        engine.add_request(Request(request_id, prompt, params, arrival_time_s=start_s))
    while engine.has_unfinished():
        outputs = engine.step()
        now_s = time.monotonic()
        for output in outputs:
            timelines[output.request_id].tokens_s.extend([now_s] * len(output.token_ids))
    duration_s = time.monotonic() - start_s
    short = [i for i, t in timelines.items() if len(t.tokens_s) != output_len]
    if short:
        raise RuntimeError(f"requests {short} did not get {output_len} tokens: the figures would be wrong")
    num_steps = engine.stats().num_steps - num_steps
    return Run(duration_s, num_steps, list(timelines.values()), list(engine.host_times_s))


def throughput(
    engine: Engine, num_prompts: int, input_len: int, output_len: int, seed: int
) -> dict[str, Any]:
    """All prompts at once: tokens a second over the whole run, prefill included."""
    vocab_size = engine.model_config.vocab_size
    run(engine, random_prompts(2, input_len, vocab_size, seed + 1), WARM_UP_TOKENS)
    result = run(engine, random_prompts(num_prompts, input_len, vocab_size, seed), output_len)
    return {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "duration_s": result.duration_s,
        "output_tok_per_s": num_prompts * output_len / result.duration_s,
        "total_tok_per_s": num_prompts * (input_len + output_len) / result.duration_s,
        "num_steps": result.num_steps,
        "ttft_ms": _percentiles_ms([t.ttft_s for t in result.timelines]),
        "itl_ms": _percentiles_ms([gap for t in result.timelines for gap in t.itl_s]),
        "host_time_between_steps_ms": _percentiles_ms(result.host_times_s),
    }


def latency(engine: Engine, input_len: int, output_len: int, num_repeats: int, seed: int) -> dict[str, Any]:
    """One request at a time: decode tokens a second after the first token, and prefill; medians."""
    vocab_size = engine.model_config.vocab_size
    run(engine, random_prompts(1, input_len, vocab_size, seed + 1), WARM_UP_TOKENS)
    prompts = random_prompts(num_repeats, input_len, vocab_size, seed)
    runs = [run(engine, [prompt], output_len) for prompt in prompts]
    alone = [r.timelines[0] for r in runs]
    long_prompts = random_prompts(num_repeats, PREFILL_LEN, vocab_size, seed + 2)
    prefills = [run(engine, [prompt], 1).timelines[0] for prompt in long_prompts]
    return {
        "input_len": input_len,
        "output_len": output_len,
        "num_repeats": num_repeats,
        "decode_tok_per_s": statistics.median(1 / statistics.mean(t.itl_s) for t in alone),
        f"prefill_{PREFILL_LEN}_tok_per_s": PREFILL_LEN / statistics.median(t.ttft_s for t in prefills),
        "ttft_ms": _percentiles_ms([t.ttft_s for t in alone]),
        "itl_ms": _percentiles_ms([gap for t in alone for gap in t.itl_s]),
        "host_time_between_steps_ms": _percentiles_ms([s for r in runs for s in r.host_times_s]),
    }


def host(engine: Engine, num_prompts: int, input_len: int, output_len: int, seed: int) -> dict[str, Any]:
    """The host's time between two steps, the device's taken out: the programs take and give all that
    they do else, and compute nothing (`Engine.compute_nothing`). Processor time of the one thread.
    """
    engine.compute_nothing()
    vocab_size = engine.model_config.vocab_size
    run(engine, random_prompts(num_prompts, input_len, vocab_size, seed + 1), WARM_UP_TOKENS)
    result = run(engine, random_prompts(num_prompts, input_len, vocab_size, seed), output_len)
    return {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "num_steps": result.num_steps,
        "host_time_between_steps_ms": _percentiles_ms(result.host_times_s),
    }


def engine_figures(engine: Engine) -> dict[str, Any]:
    """What is true of the process: compilations, peak memory, the stages of start-up in seconds."""
    stats = engine.stats()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "model": engine.config.model,
        "max_num_seqs": engine.config.max_num_seqs,
        "compilations_warmup": stats.compilations_warmup,
        "compilations_serving": stats.compilations_serving,
        "peak_rss_bytes": peak if sys.platform == "darwin" else peak * 1024,
        "startup_s": dict(engine.timeline),
    }


def _percentiles_ms(values_s: Sequence[float]) -> dict[str, float]:
    if not values_s:
        return {}
    p50, p95, p99 = (float(p) * 1e3 for p in np.percentile(values_s, (50, 95, 99)))
    return {"mean": statistics.fmean(values_s) * 1e3, "p50": p50, "p95": p95, "p99": p99}


def _show(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            value = "  ".join(f"{k} {v:.3f}" for k, v in value.items())
        elif isinstance(value, float):
            value = f"{value:.2f}"
        print(f"{name:<28} {value}")


def bench(options: BenchOptions) -> int:
    """Starts an engine, measures, prints the figures and writes them where `--json_out` says."""
    if options.measurement == "host" and options.engine.mesh != "1x1":
        raise cli.CommandError(f"--mesh={options.engine.mesh}: bench host measures one device; leave it out")
    lengths = (options.input_len, options.output_len)
    with cli.started(options.engine) as engine:
        if options.measurement == "latency":
            figures = latency(engine, *lengths, options.num_repeats, options.engine.seed)
        else:
            measure = throughput if options.measurement == "throughput" else host
            figures = measure(engine, options.num_prompts, *lengths, options.engine.seed)
        figures = engine_figures(engine) | figures
    _show(figures)
    if options.json_out is not None:
        options.json_out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return cli.run(lambda args: bench_options(args, MEASUREMENTS), bench, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Our speed beside llama.cpp's and transformers', in one run on one machine: only ratios count.

    .venv/bin/python scripts/bench_peers.py --peers_python=PATH [--rounds=3] [--json_out=FILE]

`--peers_python` is the interpreter of an environment with llama-cpp-python, torch, transformers, accelerate
and gguf. Each engine runs in a process of its own, in turn, round after round; medians are shown. All
get the same prompts, GGUF file, threads and number of sequences at a time, and decode greedily.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FIGURES = {
    "output_tok_per_s": "output tok/s, {seqs} at a time",
    "decode_tok_per_s": "decode tok/s, one alone",
    "prefill_tok_per_s": "prefill tok/s, {prefill} tokens",
}
OURS = "jaxinfer"
PEERS = {"llama.cpp": "llama_cpp", "transformers": "torch, transformers, accelerate, gguf"}
REPEATS = 3  # of one request alone and of one prefill, in each process; their median counts
Prompts = list[list[int]]


def prompts_of(count: int, length: int, vocab_size: int, seed: int) -> Prompts:
    return np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()


def measure(
    args: argparse.Namespace,
    vocab_size: int,
    generate: Callable[[Prompts, int], object],
    first_and_rest_s: Callable[[list[int], int], tuple[float, float]],
) -> dict[str, float]:
    """The three figures of a peer.

    Args:
      args: the lengths and counts.
      vocab_size: of the model.
      generate: runs prompts side by side for so many tokens each.
      first_and_rest_s: runs one prompt; seconds to its first token and from there to the last.
    """
    generate(prompts_of(2, args.input_len, vocab_size, 1), 4)
    start = time.perf_counter()
    waves = prompts_of(args.num_prompts, args.input_len, vocab_size, 0)
    for at in range(0, len(waves), args.max_num_seqs):
        generate(waves[at : at + args.max_num_seqs], args.output_len)
    throughput = args.num_prompts * args.output_len / (time.perf_counter() - start)
    rest = [
        first_and_rest_s(prompt, args.output_len)[1]
        for prompt in prompts_of(REPEATS, args.input_len, vocab_size, 2)
    ]
    first = [
        first_and_rest_s(prompt, 1)[0] for prompt in prompts_of(REPEATS, args.prefill_len, vocab_size, 3)
    ]
    return {
        "output_tok_per_s": throughput,
        "decode_tok_per_s": (args.output_len - 1) / statistics.median(rest),
        "prefill_tok_per_s": args.prefill_len / statistics.median(first),
    }


class LlamaCpp:
    """A context of llama.cpp's C interface, with its batches filled by hand."""

    def __init__(self, gguf: str, num_seqs: int, seq_len: int, threads: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = num_seqs
        params.n_ctx = num_seqs * -(-seq_len // 256) * 256  # llama.cpp pads each sequence to 256
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context for {gguf}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.batch_size = params.n_batch

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Runs (token, position, sequence, wants logits) rows; the likeliest next tokens, in order."""
        likeliest: list[int] = []
        for at in range(0, len(rows), self.batch_size):
            part = rows[at : at + self.batch_size]
            for i, (token, position, sequence, wanted) in enumerate(part):
                self.batch.token[i], self.batch.pos[i] = token, position
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
                self.batch.logits[i] = wanted
            self.batch.n_tokens = len(part)
            status = self.lib.llama_decode(self.context, self.batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}")
            num_logits = sum(row[3] for row in part)
            if num_logits:
                pointer = self.lib.llama_get_logits(self.context)
                logits = np.ctypeslib.as_array(pointer, shape=(num_logits, self.vocab_size))
                likeliest += logits.argmax(axis=1).tolist()
        return likeliest

    def start(self, prompts: Prompts) -> list[int]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        return self.decode(
            [
                (token, position, sequence, position == len(prompt) - 1)
                for sequence, prompt in enumerate(prompts)
                for position, token in enumerate(prompt)
            ]
        )

    def go_on(self, tokens: list[int], start: int, count: int) -> None:
        for position in range(start, start + count):
            tokens = self.decode([(token, position, i, True) for i, token in enumerate(tokens)])

    def generate(self, prompts: Prompts, output_len: int) -> None:
        self.go_on(self.start(prompts), len(prompts[0]), output_len - 1)

    def first_and_rest_s(self, prompt: list[int], output_len: int) -> tuple[float, float]:
        start = time.perf_counter()
        tokens = self.start([prompt])
        first = time.perf_counter()
        self.go_on(tokens, len(prompt), output_len - 1)
        return first - start, time.perf_counter() - first


def measure_llama_cpp(args: argparse.Namespace) -> dict[str, float]:
    seq_len = args.input_len + args.output_len
    many = LlamaCpp(args.gguf, args.max_num_seqs, seq_len, args.threads)
    one = LlamaCpp(args.gguf, 1, max(seq_len, args.prefill_len + 1), args.threads)
    return measure(args, many.vocab_size, many.generate, one.first_and_rest_s)


def measure_transformers(args: argparse.Namespace) -> dict[str, float]:
    import torch
    import transformers
    from transformers.generation.streamers import BaseStreamer

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    gguf = Path(args.gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    ).eval()

    class Clock(BaseStreamer):
        """Notes when each token comes; the first call brings the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    @torch.inference_mode()
    def generate(prompts: Prompts, output_len: int, streamer: BaseStreamer | None = None) -> None:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
            streamer=streamer,
        )
        assert out.shape == (len(prompts), len(prompts[0]) + output_len), out.shape

    def first_and_rest_s(prompt: list[int], output_len: int) -> tuple[float, float]:
        clock = Clock()
        start = time.perf_counter()
        generate([prompt], output_len, clock)
        return clock.times[1] - start, clock.times[-1] - clock.times[1]

    return measure(args, model.config.vocab_size, generate, first_and_rest_s)


def measure_ours(args: argparse.Namespace) -> dict[str, float]:
    """Two processes of `jaxinfer.bench`."""
    figures: dict[str, float] = {}
    bench = [sys.executable, "-m", "jaxinfer.bench", f"--model={args.gguf}"]
    lengths = [f"--input_len={args.input_len}", f"--output_len={args.output_len}"]
    throughput = [f"--num_prompts={args.num_prompts}", f"--max_num_seqs={args.max_num_seqs}"]
    for command, extra in (("throughput", throughput), ("latency", [f"--num_repeats={REPEATS}"])):
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            run_child(
                [*bench, command, *lengths, *extra, f"--json_out={out.name}"],
                args.threads,
            )
            figures |= json.loads(Path(out.name).read_text())
    figures["prefill_tok_per_s"] = figures[f"prefill_{args.prefill_len}_tok_per_s"]
    return {name: figures[name] for name in FIGURES}


def measure_peer(args: argparse.Namespace, peer: str) -> dict[str, float]:
    forwarded = [f"--{name}={getattr(args, name)}" for name in ("gguf", "threads", "num_prompts")]
    forwarded += [f"--{name}={getattr(args, name)}" for name in ("input_len", "output_len", "max_num_seqs")]
    command = [args.peers_python, str(Path(__file__).resolve()), f"--worker={peer}", *forwarded]
    return json.loads(run_child(command, args.threads).splitlines()[-1])


def run_child(command: list[str], threads: int) -> str:
    """Its standard output; its standard error, in our exception, if it fails."""
    variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    child = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}:\n{child.stderr[-2000:]}")
    return child.stdout


def has_module(python: str, module: str) -> bool:
    probe = [python, "-c", f"import {module}"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers_python", default=sys.executable, help="interpreter that has the peers")
    parser.add_argument("--gguf", default="demo", help="a GGUF file, or the demo model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num_prompts", type=int, default=64)
    parser.add_argument("--max_num_seqs", type=int, default=32)
    parser.add_argument("--input_len", type=int, default=128)
    parser.add_argument("--output_len", type=int, default=128)
    parser.add_argument("--json_out")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.prefill_len = 512  # as `jaxinfer.bench latency` measures it
    return args


def show(rows: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Prints the medians and our ratios to the peers; returns the medians."""
    medians = {
        engine: {name: statistics.median(r[name] for r in rounds) for name in FIGURES}
        for engine, rounds in rows.items()
    }
    print(f"\n{'median of ' + str(args.rounds):<28}" + "".join(f"{engine:>22}" for engine in medians))
    for name, label in FIGURES.items():
        ours = medians[OURS][name]
        cells = [
            f"{m[name]:.1f}" + ("" if e == OURS else f" (x{ours / m[name]:.2f})") for e, m in medians.items()
        ]
        text = label.format(seqs=args.max_num_seqs, prefill=args.prefill_len)
        print(f"{text:<28}" + "".join(f"{cell:>22}" for cell in cells))
    return medians


def main() -> None:
    args = parse_args()
    if args.worker:
        worker = {"llama.cpp": measure_llama_cpp, "transformers": measure_transformers}[args.worker]
        print(json.dumps(worker(args)))
        return
    if hasattr(os, "sched_setaffinity"):  # XLA takes every core it may use, so give all the same ones
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    from jaxinfer_checkpoints.hub import resolve_model

    args.gguf = str(resolve_model(args.gguf))
    peers = [p for p, module in PEERS.items() if has_module(args.peers_python, module)]
    for peer in PEERS.keys() - set(peers):
        print(f"{peer} is left out: {args.peers_python} cannot import {PEERS[peer]}")
    rows: dict[str, list[dict[str, float]]] = {engine: [] for engine in (OURS, *peers)}
    for number in range(args.rounds):
        for engine in rows:
            figures = measure_ours(args) if engine == OURS else measure_peer(args, engine)
            rows[engine].append(figures)
            text = "  ".join(f"{name} {value:.1f}" for name, value in figures.items())
            print(f"round {number + 1}  {engine:<14} {text}", flush=True)
    medians = show(rows, args)
    if args.json_out:
        Path(args.json_out).write_text(json.dumps({"medians": medians, "rounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

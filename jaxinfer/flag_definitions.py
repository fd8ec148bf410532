"""What flags there are: name, default, limits and help, by the command that has them."""

from __future__ import annotations

from absl import flags as absl_flags

from jaxinfer.config import EngineConfig
from jaxinfer.memory.chips import CHIPS
from jaxinfer.types import SamplingParams

FlagValues = absl_flags.FlagValues


def define_common(values: FlagValues) -> None:
    """Flags of every command."""
    absl_flags.DEFINE_bool("help", False, "Print the flags and stop.", flag_values=values)
    absl_flags.DEFINE_integer(
        "verbosity", -1, "What is logged: -1 warnings, 0 info, 1 debug and tracebacks.", flag_values=values
    )


def define_engine(values: FlagValues) -> None:
    """Flags of the engine, the same on every command that has one."""
    default = EngineConfig(model="")

    def text(name: str, help_text: str) -> None:
        absl_flags.DEFINE_string(name, getattr(default, name), help_text, flag_values=values)

    def count(name: str, help_text: str) -> None:
        absl_flags.DEFINE_integer(name, getattr(default, name), help_text, lower_bound=1, flag_values=values)

    def switch(name: str, help_text: str) -> None:
        absl_flags.DEFINE_bool(name, getattr(default, name), help_text, flag_values=values)

    def choice(name: str, allowed: list[str], help_text: str) -> None:
        absl_flags.DEFINE_enum(name, getattr(default, name), allowed, help_text, flag_values=values)

    absl_flags.DEFINE_string(
        "model", None, 'A directory, a .gguf file, a Hugging Face id, or "demo".', flag_values=values
    )
    text("tokenizer", "A directory, tokenizer.json or .gguf file; none is the model's own.")
    text("revision", "Branch, tag or commit, where --model is a Hugging Face id.")
    text("mesh", "DxT: D data-parallel groups of T-way tensor parallelism; PxDxT: P pipeline stages of them.")
    choice("dtype", ["auto", "float32", "bfloat16", "float16"], "Of weights and activations.")
    choice("kv_cache_dtype", ["auto", "float32", "bfloat16", "float16"], "Of the KV cache; auto is --dtype.")
    count("max_model_len", "Tokens of prompt and output at most; none is the model's own limit.")
    count("max_num_seqs", "Sequences that each group decodes together.")
    count("max_num_batched_tokens", "Prompt tokens of each group a step at most.")
    count("page_size", "Tokens in a page of the KV cache.")
    count("num_pages", "Pages of each group's KV cache; none is what the memory allows.")
    absl_flags.DEFINE_float(
        "memory_utilization",
        default.memory_utilization,
        "Fraction of the device's memory that may be used.",
        lower_bound=0.01,
        upper_bound=1.0,
        flag_values=values,
    )
    count("kv_cache_bytes", "Bytes of the KV cache on each device; none is what the memory allows.")
    switch("enable_prefix_caching", "Keep the pages of prompts for prompts that begin alike.")
    switch("enable_chunked_prefill", "Spread long prompts over several steps.")
    choice("scheduling", ["fcfs", "priority"], "The order in which requests are admitted.")
    absl_flags.DEFINE_integer(
        "seed", default.seed, "Of sampling; a request's own goes first.", flag_values=values
    )
    text(
        "compilation_cache_dir",
        'Where compiled programs are kept; none is the cache directory, "" is nowhere.',
    )
    text("bundle", "A directory of compiled programs: loads those that fit, else compiles and writes them.")
    switch("strict_shapes", "Fail where a step has to compile, instead of logging a warning.")
    text("rope_scaling", "A JSON object, as in config.json, in place of the model's own.")
    choice("verify", ["none", "size", "sha256"], "How the checkpoint's files are checked.")
    choice("load_format", ["auto", "dummy"], "dummy is random weights.")
    choice(
        "attention",
        ["auto", "cpu", "tpu", "gpu", "xla"],
        "The attention kernel; auto is tpu on a TPU, cpu on a CPU in float32 where a C++ compiler is found, "
        "else xla. tpu and gpu are interpreted elsewhere.",
    )
    choice(
        "matmul",
        ["auto", "cpu", "xla"],
        "The products with the weights; auto is cpu as for attention, and on a mesh of T=1, else xla.",
    )


def define_hosts(values: FlagValues) -> None:
    """Which of several hosts this is."""
    absl_flags.DEFINE_string(
        "coordinator",
        None,
        "HOST:PORT of host 0, or auto, which asks Cloud TPU, Slurm or Kubernetes; none is this host alone.",
        flag_values=values,
    )
    absl_flags.DEFINE_integer(
        "num_hosts", None, "Hosts that run the model together.", lower_bound=1, flag_values=values
    )
    absl_flags.DEFINE_integer(
        "host_id", None, "This host's number, from 0, which answers.", lower_bound=0, flag_values=values
    )
    absl_flags.DEFINE_integer(
        "preflight_timeout_s",
        60,
        "Seconds in which all hosts must have met.",
        lower_bound=1,
        flag_values=values,
    )


def define_sampling(values: FlagValues) -> None:
    """Sampling parameters."""
    default = SamplingParams()
    for name, start, help_text in (
        ("temperature", 0.0, "0 is greedy."),
        ("top_p", default.top_p, "Keep the likeliest tokens whose probabilities reach this sum."),
        ("min_p", default.min_p, "Keep tokens at least this fraction as likely as the likeliest."),
        ("repetition_penalty", default.repetition_penalty, "Over 1 disfavours tokens of prompt and output."),
        ("presence_penalty", default.presence_penalty, "Taken from the logits of the output's tokens."),
        ("frequency_penalty", default.frequency_penalty, "The same, for each time that a token came."),
    ):
        absl_flags.DEFINE_float(name, start, help_text, flag_values=values)
    absl_flags.DEFINE_integer(
        "top_k", default.top_k, "Keep the k likeliest tokens; 0 is all.", flag_values=values
    )
    absl_flags.DEFINE_integer(
        "min_tokens", default.min_tokens, "Tokens before the output may end.", flag_values=values
    )
    absl_flags.DEFINE_integer("max_tokens", 256, "Tokens of output at most.", flag_values=values)
    absl_flags.DEFINE_multi_string("stop", [], "A string that ends the output", flag_values=values)
    absl_flags.DEFINE_multi_integer(
        "stop_token_ids", [], "A token id that ends the output", flag_values=values
    )
    absl_flags.DEFINE_bool("ignore_eos", False, "Go on after the end of sequence.", flag_values=values)


def define_generate(values: FlagValues) -> None:
    """Flags of `jaxinfer.generate`."""
    absl_flags.DEFINE_string("prompt", None, "The text to go on from; none is stdin.", flag_values=values)
    absl_flags.DEFINE_bool(
        "chat",
        False,
        "Hold a conversation, a line of stdin a turn; --prompt is its only turn.",
        flag_values=values,
    )
    absl_flags.DEFINE_bool(
        "stats", False, "Print stages, latencies and tokens a second to stderr.", flag_values=values
    )
    absl_flags.DEFINE_bool("json", False, "Print one JSON object an answer.", flag_values=values)


def define_batch(values: FlagValues) -> None:
    """Flags of `jaxinfer.batch`."""
    absl_flags.DEFINE_string("input", None, "A .jsonl file, a request a line.", flag_values=values)
    absl_flags.DEFINE_string(
        "output", None, "The .jsonl file to write, an answer a line.", flag_values=values
    )
    absl_flags.DEFINE_bool("overwrite", False, "Replace the output where it exists.", flag_values=values)


def define_serve(values: FlagValues) -> None:
    """Flags of `jaxinfer.serve`."""
    absl_flags.DEFINE_string(
        "host", "127.0.0.1", "Address to listen on; 0.0.0.0 is all of them.", flag_values=values
    )
    absl_flags.DEFINE_integer(
        "port",
        8000,
        "Port to listen on; 0 is any free one.",
        lower_bound=0,
        upper_bound=65535,
        flag_values=values,
    )
    absl_flags.DEFINE_string(
        "served_model_name", None, "The model's name in the API; none is --model.", flag_values=values
    )
    absl_flags.DEFINE_integer(
        "max_waiting_requests",
        1024,
        "Completions without a first token, over which new requests are answered with 429; n counts as n.",
        lower_bound=1,
        flag_values=values,
    )
    absl_flags.DEFINE_integer(
        "shutdown_timeout_s",
        30,
        "Seconds that running requests have to end after SIGINT or SIGTERM.",
        lower_bound=0,
        flag_values=values,
    )


def define_bench(values: FlagValues) -> None:
    """Flags of `jaxinfer.bench`."""
    for name, start, help_text in (
        ("num_prompts", 64, "Prompts of `throughput` and `host`, given at once."),
        ("input_len", 128, "Tokens of a prompt."),
        ("output_len", 128, "Tokens of an output."),
        ("num_repeats", 3, "Runs of `latency`, of which the median counts."),
    ):
        absl_flags.DEFINE_integer(name, start, help_text, lower_bound=1, flag_values=values)
    absl_flags.DEFINE_string("json_out", None, "A file for the figures as JSON.", flag_values=values)


def define_plan(values: FlagValues) -> None:
    """Flags of `jaxinfer.plan`."""
    absl_flags.DEFINE_enum(
        "chip", "cpu", ["cpu", *CHIPS], "The accelerator; cpu is this machine.", flag_values=values
    )
    absl_flags.DEFINE_enum(
        "quantize",
        "none",
        ["none", "int8", "fp8", "int4"],
        "Weight-only, of the projections: what would fit. The engine does not quantise weights yet.",
        flag_values=values,
    )
    absl_flags.DEFINE_integer(
        "mean_len",
        1024,
        "Tokens of a request, prompt and output, on average.",
        lower_bound=1,
        flag_values=values,
    )
    absl_flags.DEFINE_integer(
        "batch",
        None,
        "Requests of the mean length that decode together; none is as many as fit.",
        lower_bound=1,
        flag_values=values,
    )
    absl_flags.DEFINE_bool(
        "compile",
        False,
        "Compile the largest steps for the chip, and take temporaries and programs from the compiler.",
        flag_values=values,
    )
    absl_flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=values)

"""Command-line flags and the environment: the only place that reads either.

Each command has a frozen options type and a function that makes it of an argument list. The flags
live in an `absl.flags.FlagValues` of that call, so a command has just the flags that it honours.
"""

from __future__ import annotations

import json
import logging as standard_logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from absl import logging

from jaxinfer.config import ConfigError, EngineConfig, HostsConfig, parse_mesh
from jaxinfer.flag_definitions import (
    define_batch,
    define_bench,
    define_common,
    define_engine,
    define_generate,
    define_hosts,
    define_plan,
    define_sampling,
    define_serve,
)
from jaxinfer.parallel.cluster import find_hosts
from jaxinfer.types import RequestError, SamplingParams

FlagValues = absl_flags.FlagValues

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"),
)
_HINT = "; --help lists the flags"


class UsageError(Exception):
    """A flag that is wrong, unknown or missing: one line."""


class HelpRequestedError(Exception):
    """Not an error: the text that --help asks for."""


@dataclass(frozen=True)
class Sampling:
    """The sampling flags: all of them as parameters, and those that were given, by name."""

    params: SamplingParams
    given: Mapping[str, Any]

    def params_for(self, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """The parameters of one prompt: the default of --max_tokens, which nobody chose, gives way to
        the length limit, where a number that was given is refused by the engine.
        """
        room = max_model_len - num_prompt_tokens
        if "max_tokens" in self.given or self.params.max_tokens is None:
            return self.params
        return replace(self.params, max_tokens=max(1, min(self.params.max_tokens, room)))


@dataclass(frozen=True)
class GenerateOptions:
    """Flags of `jaxinfer.generate`. `prompt` None is stdin."""

    verbosity: int
    engine: EngineConfig
    sampling: Sampling
    prompt: str | None
    chat: bool
    stats: bool
    json: bool


@dataclass(frozen=True)
class BatchOptions:
    """Flags of `jaxinfer.batch`."""

    verbosity: int
    engine: EngineConfig
    sampling: Sampling
    input: Path
    output: Path
    overwrite: bool


@dataclass(frozen=True)
class ServeOptions:
    """Flags of `jaxinfer.serve`."""

    verbosity: int
    engine: EngineConfig
    host: str
    port: int
    served_model_name: str
    max_waiting_requests: int
    shutdown_timeout_s: int


@dataclass(frozen=True)
class BenchOptions:
    """Flags of `jaxinfer.bench`, and which measurement was named."""

    verbosity: int
    engine: EngineConfig
    measurement: str
    num_prompts: int
    input_len: int
    output_len: int
    num_repeats: int
    json_out: Path | None


@dataclass(frozen=True)
class PlanOptions:
    """Flags of `jaxinfer.plan`. `batch` None is as many requests as fit."""

    verbosity: int
    engine: EngineConfig
    chip: str
    quantize: str
    mean_len: int
    batch: int | None
    compile: bool
    json: bool


def generate_options(argv: Sequence[str]) -> GenerateOptions:
    """Raises UsageError, or HelpRequestedError for --help; so do the functions below."""
    values = _parse("generate", argv, define_engine, define_hosts, define_sampling, define_generate)
    return GenerateOptions(
        values.verbosity,
        engine_config(values),
        _sampling(values),
        values.prompt,
        values.chat,
        values.stats,
        values.json,
    )


def batch_options(argv: Sequence[str]) -> BatchOptions:
    """Flags of `jaxinfer.batch`; checks that the files' endings are known."""
    values = _parse("batch", argv, define_engine, define_hosts, define_sampling, define_batch)
    for name in ("input", "output"):
        path = _required(values, name, f"{name}.jsonl")
        if not path.endswith(".jsonl"):
            ending = Path(path).suffix or "no ending"
            raise UsageError(f"flag --{name}={path}: {ending} is not supported; the name must end in .jsonl")
    files = Path(values.input), Path(values.output)
    return BatchOptions(values.verbosity, engine_config(values), _sampling(values), *files, values.overwrite)


def serve_options(argv: Sequence[str]) -> ServeOptions:
    """Flags of `jaxinfer.serve`."""
    values = _parse("serve", argv, define_engine, define_hosts, define_serve)
    config = engine_config(values)
    return ServeOptions(
        values.verbosity,
        config,
        values.host,
        values.port,
        values.served_model_name or config.model,
        values.max_waiting_requests,
        values.shutdown_timeout_s,
    )


def bench_options(argv: Sequence[str], measurements: Sequence[str]) -> BenchOptions:
    """Flags of `jaxinfer.bench`, whose one argument is one of `measurements`."""
    values = _parse(
        "bench", argv, define_engine, define_hosts, define_bench, arguments="|".join(measurements)
    )
    arguments = values.remaining
    if len(arguments) != 1 or arguments[0] not in measurements:
        given = " ".join(arguments) or "nothing"
        raise UsageError(f"bench measures one of {', '.join(measurements)}, not {given!r}{_HINT}")
    return BenchOptions(
        values.verbosity,
        engine_config(values).replace(strict_shapes=True),  # a figure with a compilation in it is none
        arguments[0],
        values.num_prompts,
        values.input_len,
        values.output_len,
        values.num_repeats,
        Path(values.json_out) if values.json_out else None,
    )


def plan_options(argv: Sequence[str]) -> PlanOptions:
    """Flags of `jaxinfer.plan`."""
    values = _parse("plan", argv, define_engine, define_plan)
    if values.compile and values.quantize != "none":
        raise UsageError("flag --compile: it compiles what the engine runs, so --quantize must be none")
    if values.bundle is not None and not values.compile:
        raise UsageError("flag --bundle: plan writes what it compiles, so it needs --compile")
    return PlanOptions(
        values.verbosity,
        engine_config(values),
        values.chip,
        values.quantize,
        values.mean_len,
        values.batch,
        values.compile,
        values.json,
    )


def environment() -> dict[str, str]:
    """What the environment decides of an EngineConfig: its directories, and the options that XLA reads."""
    cache_dir = Path(os.environ.get("JAXINFER_CACHE_DIR") or Path.home() / ".cache" / "jaxinfer")
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache_dir / "compiled")
    xla_flags = filter(None, map(os.environ.get, ("XLA_FLAGS", "LIBTPU_INIT_ARGS")))
    return {
        "cache_dir": str(cache_dir),
        "compilation_cache_dir": compiled,
        "xla_flags": " ".join(xla_flags),
    }


def engine_config(values: Any) -> EngineConfig:
    """The engine flags as a configuration; raises UsageError."""
    _required(values, "model", "demo")
    try:
        parse_mesh(values.mesh)
    except ConfigError as error:
        raise UsageError(f"flag --{error}") from error
    if values.rope_scaling is not None:
        _check_json_object("rope_scaling", values.rope_scaling)
    given = {
        field.name: getattr(values, field.name) for field in fields(EngineConfig) if field.name in values
    }
    if values.compilation_cache_dir is None:
        del given["compilation_cache_dir"]
    hosts = _hosts(values) if "coordinator" in values else None
    return EngineConfig(**{**environment(), **given, "hosts": hosts})


def _hosts(values: Any) -> HostsConfig | None:
    timeout_s = values.preflight_timeout_s if values["preflight_timeout_s"].present else None
    try:
        return hosts_of_job(values.coordinator, values.num_hosts, values.host_id, timeout_s)
    except ConfigError as error:
        raise UsageError(f"flag --{error}") from error


def hosts_of_job(
    coordinator: str | None = None,
    num_hosts: int | None = None,
    host_id: int | None = None,
    preflight_timeout_s: float | None = None,
) -> HostsConfig | None:
    """The hosts that run an engine together: by hand, or with the coordinator "auto" as the job says, but for
    what was given; None where there is but this one.

    Raises:
      ConfigError: too little was given, or there is no such job.
    """
    if coordinator == "auto":
        if host_id is not None:
            raise ConfigError(f"host_id={host_id}: coordinator=auto finds it; leave it out")
        hosts = find_hosts(os.environ, num_hosts)
    elif coordinator is not None and num_hosts is not None and host_id is not None:
        hosts = HostsConfig(coordinator, num_hosts, host_id)
    elif coordinator is num_hosts is host_id is preflight_timeout_s is None:
        return None
    else:
        raise ConfigError("coordinator, num_hosts and host_id go together; preflight_timeout_s needs them")
    if hosts is None or preflight_timeout_s is None:
        return hosts
    return replace(hosts, preflight_timeout_s=float(preflight_timeout_s))


def describe_absent_tpus() -> None:
    """Keeps libtpu from looking for a TPU and its metadata, and from warning that there is none."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")  # any: the topology is given by name
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def keep_libtpu_quiet() -> None:
    """Where there is no TPU, but libtpu for `plan`: it would say so in five lines."""
    if not any(Path("/dev").glob("accel*")) and not Path("/dev/vfio").exists():
        describe_absent_tpus()


def set_up_logging(verbosity: int) -> None:
    """Sends absl's log to stderr: -1 is warnings and worse, 0 info, 1 debug."""
    absl_flags.FLAGS.mark_as_parsed()  # absl warns of every line that it logs before
    logging.use_absl_handler()
    logging.set_verbosity(verbosity)
    # At debug level jax logs a dozen lines for each program.
    standard_logging.getLogger("jax").setLevel(standard_logging.WARNING)


# --- Parsing --------------------------------------------------------------------------------------


class _Values(FlagValues):
    """Flags, and the arguments that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["remaining"] = []


def _parse(command: str, argv: Sequence[str], *definers: Callable[[Any], None], arguments: str = "") -> Any:
    """The values of the flags that the definers define; arguments: what else the command takes."""
    values = _Values()
    define_common(values)
    own = set(values) - set(FlagValues())
    for define in definers:
        define(values)
    try:
        remaining = values(["", *argv])[1:]
    except absl_flags.Error as error:
        raise UsageError(f"{str(error).rstrip('.')}{_HINT}") from error
    if values.help:
        raise HelpRequestedError(_help(command, arguments, values, own))
    if remaining and not arguments:
        raise UsageError(f"{remaining[0]!r} is not a flag; flags are written --name=value{_HINT}")
    values.__dict__["remaining"] = remaining
    return values


def _help(command: str, arguments: str, values: FlagValues, last: set[str]) -> str:
    lines = [f"python -m jaxinfer.{command} {arguments + ' ' if arguments else ''}--name=value ...", ""]
    names = [n for n in values if values[n].help and n not in ("flagfile", "undefok")]
    for name in sorted(names, key=lambda n: (n in last, n)):
        flag = values[name]
        default = "none" if flag.default is None else json.dumps(flag.default)
        text = (flag.help or "").replace(
            ";\n    repeat this option to specify a list of values", "; may be repeated"
        )
        lines += [f"  --{name}  (default: {default})", f"      {text}"]
    return "\n".join(lines)


def _required(values: Any, name: str, example: str) -> str:
    value = getattr(values, name)
    if not value:
        raise UsageError(f"flag --{name} is missing; for example --{name}={example}")
    return value


def _check_json_object(name: str, text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise UsageError(f"flag --{name}={text}: must be a JSON object, as in config.json")


def _sampling(values: Any) -> Sampling:
    # --seed is the engine's flag too: a request has a seed of its own only where it was given.
    given = {name: getattr(values, name) for name in _SAMPLING if values[name].present}
    try:
        every = {name: getattr(values, name) for name in _SAMPLING if name != "seed"}
        params = SamplingParams(**{**every, **given})
    except RequestError as error:
        raise UsageError(f"flag --{error}{_HINT}") from error
    return Sampling(params, given)

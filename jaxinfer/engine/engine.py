"""The step loop: requests in, tokens out, one step of overlap between the host and the device."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh

from jaxinfer.config import ConfigError, EngineConfig, parse_mesh
from jaxinfer.engine.compilation import (
    CompilationCounter,
    CompiledWhileServingError,
    bypass_persistent_cache,
    use_persistent_cache,
)
from jaxinfer.engine.cpu_kernels import load_cpu_kernels
from jaxinfer.engine.hollow import hollow_programs
from jaxinfer.engine.host_memory import keep_freed_memory, use_huge_pages
from jaxinfer.engine.outputs import LiveCompletion, LiveRequest
from jaxinfer.engine.preflight import devices_of_all, flags_and_versions, sizes
from jaxinfer.engine.prepare import prepare_programs
from jaxinfer.engine.resolve import check, resolve
from jaxinfer.engine.runner import InFlight, Runner
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.memory.ledger import DoesNotFitError
from jaxinfer.memory.measured import MemoryReport
from jaxinfer.metrics import EngineStats, Metrics
from jaxinfer.models.families import load_model_config
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weights import load_stages, random_stages
from jaxinfer.parallel.hosts import Hosts
from jaxinfer.parallel.mesh import make_meshes, stages_here
from jaxinfer.text import Tokenizer, load_tokenizer
from jaxinfer.types import (
    ContextLengthError,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    Sequence,
    StepPlan,
    StepResult,
    TokenOutput,
)
from jaxinfer_checkpoints import CheckpointReader, open_checkpoint, resolve_model

MAX_HOST_TIMES = 65536


class Engine:
    """A model that serves. Not thread safe: one thread calls `add_request`, `abort` and `step`.

    On several hosts each has an engine, which plans every step by itself. Host 0 tells the others each of
    these three calls that it takes, and they make the same (`follow`), so that all plan the same steps; or
    all are called alike without that, and compare what with (`agree`). It must be used in a `with` statement
    then, whose end on host 0 ends those that follow.

    Attributes:
      config: as given. The parts' own configurations, complete, stand beside it.
      timeline: the stages of start-up and their seconds. Compiling overlaps with loading.
      host_times_s: of the latest steps, the seconds of processor time that the host's thread took.
        Waiting for the device is not part of it. On a CPU, computing is, as far as XLA does it on the
        thread that launches a program: `compute_nothing` takes it out.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_lost_host: Callable[[str], None] | None = None,
        *,
        tells_others: bool = True,
    ) -> None:
        """Loads and compiles everything.

        Args:
          config: what to run.
          on_lost_host: as for the method of this name, from the moment when all hosts have met.
          tells_others: on host 0 of several, whether the others `follow`; else they are called as this one.

        Raises:
          ConfigError, CheckpointError: one line that says what is wrong.
          HostsError: of several hosts, one that names the host which is absent, differs or failed.
        """
        check(config)
        self._hosts = None
        if config.hosts is not None:
            self._hosts = Hosts(config.hosts, flags_and_versions(config), on_lost_host)
        leads = tells_others and self._hosts is not None and self._hosts.leads
        self._followers = self._hosts if leads else None
        try:
            self._start(config)
        except Exception as error:
            self._leave(error)
            raise

    def _start(self, config: EngineConfig) -> None:
        start_s = time.monotonic()
        self.config = config
        self.metrics = Metrics()
        self.host_times_s: deque[float] = deque(maxlen=MAX_HOST_TIMES)
        if config.bundle:
            bypass_persistent_cache()
        elif config.compilation_cache_dir:
            use_persistent_cache(Path(config.compilation_cache_dir))
        self._counter = CompilationCounter()
        cache_dir = Path(config.cache_dir) if config.cache_dir else None
        path = resolve_model(config.model, config.revision, cache_dir)
        reader = open_checkpoint(path, config.verify)
        mesh_config = parse_mesh(config.mesh)
        devices = jax.devices() if self._hosts is None else devices_of_all(self._hosts, reader, mesh_config)
        meshes = make_meshes(mesh_config, devices)
        self._stages = stages_here(meshes)
        self.model_config = load_model_config(reader, rope_scaling_override=config.rope_scaling)
        device = jax.local_devices()[0]
        cpu_kernels = load_cpu_kernels(config, device)
        try:
            resolved = resolve(config, self.model_config, device, cpu_kernels=cpu_kernels)
        except DoesNotFitError as error:
            raise ConfigError(f"{error}; jaxinfer.plan says what to change") from error
        self._resolved = resolved
        self.model_config = replace(self.model_config, matmul=resolved.matmul)
        logging.info("bytes of a device, planned: %s", resolved.ledger(self._stages))
        self.scheduler_config, self.cache_config = resolved.scheduler, resolved.cache
        self._scheduler = Scheduler(resolved.scheduler, resolved.cache)
        dtype = jnp.dtype(resolved.dtype)
        opened_s = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            programs = pool.submit(
                prepare_programs, config, self.model_config, resolved, meshes, self._counter, self._hosts
            )
            tokenizer = pool.submit(_load_tokenizer, config, path, reader, cache_dir)
            try:
                stages = self._load_weights(reader, dtype, meshes)
                loaded_s = time.monotonic()
                self.tokenizer: Tokenizer = tokenizer.result()
                self._runner = Runner(stages, programs.result(), resolved.cache, resolved.scheduler, meshes)
            except BaseException:  # Ctrl-C too: nobody waits then for all that is left to compile
                self._counter.stopped.set()
                raise
        reader.close()
        if self._hosts is not None:
            self._hosts.agree({"tokenizer": self.tokenizer.digest(), **sizes(resolved)})
        if device.platform == "cpu":
            keep_freed_memory()
            # Takes a second, for which nobody need wait.
            threading.Thread(target=use_huge_pages, args=(jax.tree.leaves(stages),), daemon=True).start()
        ready_s = time.monotonic()
        self.timeline = (
            ("open", opened_s - start_s),
            ("load", loaded_s - opened_s),
            ("compile", ready_s - loaded_s),
        )
        self._eos_token_ids = self.tokenizer.eos_token_ids | set(self.model_config.eos_token_ids)
        self._rng = random.Random(config.seed)
        self._requests: dict[str, LiveRequest] = {}
        self._completions: dict[int, LiveCompletion] = {}
        self._next_seq_id = 0
        self._in_flight: deque[InFlight] = deque()
        self._num_compiled_at_start = self._counter.total.num_compilations
        self._totals = _Totals()
        self._device = device
        self._measured_bytes = self._runner.memory_bytes(resolved.fullest_stage(self._stages))
        self.metrics.observe_memory(self._measured_bytes)
        logging.info(
            "ready: %d pages of %d tokens, %d slots, length limit %d; %d programs compiled, %d cached",
            self.cache_config.num_pages,
            self.cache_config.page_size,
            self.scheduler_config.max_num_seqs,
            self.scheduler_config.max_model_len,
            self._num_compiled_at_start,
            self._counter.total.num_cache_hits,
        )

    def _load_weights(
        self, reader: CheckpointReader, dtype: jnp.dtype, meshes: tuple[Mesh | None, ...]
    ) -> dict[int, Transformer]:
        if self.config.load_format == "dummy":
            return random_stages(self.model_config, dtype, self.config.seed, meshes)
        return load_stages(reader, self.model_config, dtype, meshes)

    def add_request(self, request: Request) -> None:
        """Takes a request, which `step` then works on.

        Raises:
          RequestError: it cannot be honoured; nothing of it is kept.
        """
        self._check_request(request)
        params, num_prompt = request.params, len(request.prompt_token_ids)
        limit = self.scheduler_config.max_model_len
        max_total = limit if params.max_tokens is None else num_prompt + params.max_tokens
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self._eos_token_ids
        )
        seed = self._rng.getrandbits(63) if params.seed is None else params.seed
        owner = LiveRequest(request, params.n)
        for index in range(params.n):
            sequence = Sequence(
                seq_id=self._next_seq_id,
                request=request,
                index=index,
                seed=seed + index,
                stop_ids=stop_ids,
                max_total_tokens=max_total,
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=num_prompt,
            )
            self._scheduler.add(sequence)
            self._completions[sequence.seq_id] = LiveCompletion(sequence, owner, self.tokenizer)
            self._next_seq_id += 1
        self._requests[request.request_id] = owner
        if self._followers is not None:  # with the seed that was drawn
            self._followers.tell({"add": asdict(replace(request, params=replace(params, seed=seed)))})

    def _check_request(self, request: Request) -> None:
        params, ids = request.params, request.prompt_token_ids
        limit, vocab_size = self.scheduler_config.max_model_len, self.model_config.vocab_size
        if request.request_id in self._requests:
            raise RequestError(f"request_id={request.request_id!r} is running already", "request_id")
        if not ids:
            raise RequestError("prompt is empty: give at least one token", "prompt")
        if len(ids) >= limit:
            raise ContextLengthError(
                f"prompt has {len(ids)} tokens, and the length limit is {limit} with the answer: shorten it",
                "prompt",
            )
        if params.max_tokens is not None and len(ids) + params.max_tokens > limit:
            raise ContextLengthError(
                f"prompt has {len(ids)} tokens and max_tokens={params.max_tokens}: "
                f"together over the length limit of {limit}; shorten one of them",
                "max_tokens",
            )
        for name, values in (
            ("prompt", ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
        ):
            outside = [i for i in values if not 0 <= i < vocab_size]
            if outside:
                raise RequestError(
                    f"{name} holds token id {outside[0]}: ids go from 0 to {vocab_size - 1}", name
                )

    def abort(self, request_id: str) -> None:
        """Drops a request at any moment and frees its pages; nothing where it is not running."""
        if self._requests.pop(request_id, None) is None:
            return
        for sequence in self._scheduler.abort(request_id):
            del self._completions[sequence.seq_id]
        self.metrics.observe_abort(request_id)
        if self._followers is not None:
            self._followers.tell({"abort": request_id})

    def has_unfinished(self) -> bool:
        """True while `step` has something to do."""
        return self._scheduler.has_unfinished() or bool(self._in_flight)

    def step(self) -> list[TokenOutput]:
        """Launches the next step, then reads the one before it. Returns what that one brought.

        With pipeline stages the one before is the same wave's, and the steps between the two stay in flight.

        Raises:
          CompiledWhileServingError: something was compiled, which `strict_shapes` forbids.
          HostsError: another host has gone.
        """
        if self._followers is not None:
            self._followers.tell({"step": None})
        with self._counter.watch() as compiled:
            try:
                outputs = self._launch_and_read()
            except jax.errors.JaxRuntimeError as error:
                if self._hosts is not None and (lost := self._hosts.lost()):
                    raise lost from error
                raise
        if compiled.names:
            self._note_compiled(compiled.names)
        return outputs

    def _launch_and_read(self) -> list[TokenOutput]:
        start_s, worked_s = time.monotonic(), time.thread_time()
        waves = [step.plan.wave for step in self._in_flight]
        plan = self._scheduler.schedule()
        if plan is not None:
            self._in_flight.append(self._runner.launch(plan))
            self._note_scheduled(plan, start_s)
        outputs: list[TokenOutput] = []
        for _ in range(_num_due(waves, plan)):
            step = self._in_flight.popleft()
            result = self._runner.read(step)
            self._note_prompt_logprobs(step.plan, result)
            for sequence in self._scheduler.commit(step.plan, result):
                outputs.append(self._output(sequence, result))
        self.host_times_s.append(time.thread_time() - worked_s)
        return outputs

    def _note_compiled(self, names: list[str]) -> None:
        self._totals.num_compilations += len(names)
        message = (
            f"compiled while serving: {', '.join(names)}; start-up makes every program that a step needs"
        )
        if self.config.strict_shapes:
            raise CompiledWhileServingError(message)
        logging.warning("%s", message)

    def _note_scheduled(self, plan: StepPlan, now_s: float) -> None:
        totals = self._totals
        totals.num_steps += 1
        totals.num_decode_tokens += len(plan.decodes)
        for seq in plan.prefills:
            totals.num_prefill_tokens += seq.num_tokens
            if not seq.first:
                continue
            owner = self._completions[seq.sequence.seq_id].owner
            if owner.first_scheduled_time_s is None:
                owner.first_scheduled_time_s = now_s
            if seq.sequence.num_preemptions:
                totals.num_preemptions += 1
            else:
                totals.prefix_cache_queries += seq.sequence.num_prompt_tokens
                totals.prefix_cache_hits += seq.sequence.num_cached_tokens

    def _note_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for seq in plan.prefills:
            entries = result.prompt_logprobs.get(seq.sequence.seq_id)
            completion = self._completions.get(seq.sequence.seq_id)
            if entries and completion is not None and seq.sequence.index == 0:
                # By position: a sequence that was preempted computes its prompt again.
                first = seq.start + 1
                completion.owner.prompt_logprobs[first : first + len(entries)] = entries

    def _output(self, sequence: Sequence, result: StepResult) -> TokenOutput:
        completion = self._completions[sequence.seq_id]
        sampled = result.sampled[sequence.seq_id]
        text, stop = completion.add_token(sampled.token_id)
        if stop is not None:
            self._scheduler.finish(sequence, FinishReason.STOP, stop)
        output = completion.output(text, sampled.token_id, sampled.logprobs)
        if output.finish_reason is not None:
            del self._completions[sequence.seq_id]
        if output.request_finished:
            del self._requests[sequence.request.request_id]
        self.metrics.observe_output(output, sequence.num_prompt_tokens)
        return output

    def follow(self) -> None:
        """On a host that is not the first: does what that one's engine is told, until that one ends.

        Raises:
          HostsError: it has gone, or failed.
        """
        assert self._hosts is not None
        while "end" not in (message := self._hosts.receive()):
            match message:
                case {"add": request}:
                    self.add_request(request_from_dict(request))
                case {"abort": request_id}:
                    self.abort(request_id)
                case {"step": _}:
                    self.step()

    def agree(self, facts: Mapping[str, str]) -> None:
        """Returns when all hosts have called this, with the same facts: what their next calls will be of.

        Raises:
          HostsError: on every host, naming the one that differs and in what, or that has gone.
        """
        if self._hosts is not None:
            self._hosts.agree(facts)

    def on_lost_host(self, callback: Callable[[str], None]) -> None:
        """Calls back, from another thread, with a line that names a host that has gone; at any moment, also
        while a step waits for it, as jax does for a minute or more.
        """
        if self._hosts is not None:
            self._hosts.watch(callback)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)
        if error is None and self._hosts is not None:
            jax.distributed.shutdown()  # returns when all hosts have come here

    def _leave(self, error: BaseException | None = None) -> None:
        """Ends the links to the other hosts, where there are any."""
        if self._hosts is not None:
            self._hosts.leave("" if error is None else str(error) or type(error).__name__)

    def memory(self) -> MemoryReport:
        """The ledger, planned and measured, and what the cache holds now."""
        resolved = self._resolved
        return MemoryReport(
            planned=resolved.ledger(self._stages),
            measured=self._measured_bytes,
            budget_bytes=resolved.budget_bytes,
            device=self._device.memory_stats(),
            cache=resolved.cache,
            num_groups=resolved.scheduler.num_groups,
            page_bytes=resolved.memory.page_bytes,
            num_used_pages=self._scheduler.num_used_pages,
            num_cached_pages=self._scheduler.num_cached_pages,
        )

    def compute_nothing(self) -> None:
        """From now on the device has no work and the tokens no meaning: what a step takes is the host's."""
        self._runner.programs = hollow_programs(self._runner.programs)

    def stats(self) -> EngineStats:
        """The state now."""
        totals = self._totals
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_cache_usage=self._scheduler.kv_cache_usage,
            num_pages=self.cache_config.num_pages * self.scheduler_config.num_groups,
            num_preemptions=totals.num_preemptions,
            prefix_cache_queries=totals.prefix_cache_queries,
            prefix_cache_hits=totals.prefix_cache_hits,
            compilations_warmup=self._num_compiled_at_start,
            compilations_serving=totals.num_compilations,
            num_steps=totals.num_steps,
            num_prefill_tokens=totals.num_prefill_tokens,
            num_decode_tokens=totals.num_decode_tokens,
            num_padding_tokens=self._runner.num_padding_rows,
        )


def _num_due(waves: list[int], plan: StepPlan | None) -> int:
    """How many of the steps in flight, oldest first and known by their waves, are read now that one more was
    launched: those up to the same wave's, or the oldest where nothing was left to launch.
    """
    if plan is None:
        return min(1, len(waves))
    return max((n for n, wave in enumerate(waves, 1) if wave == plan.wave), default=0)


class _Totals:
    """What has been done since the start."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_compilations = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0


def request_from_dict(values: Mapping[str, Any]) -> Request:
    """A request out of JSON, where keys are strings."""
    params = dict(values["params"])
    params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
    prompt = tuple(values["prompt_token_ids"])
    return Request(**{**values, "prompt_token_ids": prompt, "params": SamplingParams(**params)})


def _load_tokenizer(
    config: EngineConfig, path: Path, reader: CheckpointReader, cache_dir: Path | None
) -> Tokenizer:
    if config.tokenizer is not None:
        return load_tokenizer(resolve_model(config.tokenizer, None, cache_dir, flag="tokenizer"))
    return load_tokenizer(path, reader.config if reader.format == "gguf" else None)

"""The offline API: prompts in, finished outputs back, in the order given."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import Any

from tqdm import tqdm

from jaxinfer.cli import lose_host
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.flags import environment, hosts_of_job
from jaxinfer.types import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
    as_token_ids,
)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model for offline inference: `LLM("demo").generate("Once upon a time")`.

    On several hosts each runs the same script, in which all make the same calls and get the same outputs. It
    must be used in a `with` statement then. A process whose other hosts go ends, since jax cannot go on.
    """

    def __init__(
        self,
        model: str,
        *,
        coordinator: str | None = None,
        num_hosts: int | None = None,
        host_id: int | None = None,
        preflight_timeout_s: float | None = None,
        **engine_args: Any,
    ) -> None:
        """Args:
          model: a path, a Hugging Face id, a .gguf file, or "demo".
          coordinator: where several hosts run the model: host 0's HOST:PORT, or "auto", which asks the job.
          num_hosts: how many.
          host_id: this one, from 0.
          preflight_timeout_s: seconds in which all hosts must have met.
          **engine_args: fields of `EngineConfig`; those that name directories are as for the commands
            where they are left out.

        Raises:
          ConfigError, CheckpointError: one line that says what is wrong.
          HostsError: of several hosts, one that names the host which is absent, differs or failed.
        """
        hosts = hosts_of_job(coordinator, num_hosts, host_id, preflight_timeout_s)
        config = EngineConfig(model=model, hosts=hosts, **{**environment(), **engine_args})
        on_lost_host = None if hosts is None else partial(lose_host, hosts)
        self.engine = Engine(config, on_lost_host, tells_others=False)
        self._may_run = hosts is None

    def __enter__(self) -> LLM:
        self._may_run = True
        self.engine.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.__exit__(kind, error, trace)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes each prompt.

        Args:
          prompts: a string, a list of token ids, or a list of either.
          sampling_params: for all, or one each.
          use_tqdm: shows a progress bar on a terminal.

        Returns:
          One output a prompt, in the order given.

        Raises:
          RequestError: a prompt or a parameter cannot be honoured; nothing is generated then.
        """
        listed = [prompts] if isinstance(prompts, str) else _listed("prompts", prompts)
        if listed and all(isinstance(item, Integral) for item in listed):
            listed = [listed]
        texts = [p if isinstance(p, str) else None for p in listed]
        token_ids = [
            tuple(self.engine.tokenizer.encode(p)) if isinstance(p, str) else as_token_ids("prompts", p)
            for p in listed
        ]
        return self._run(texts, token_ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several, through the model's chat template.

        Raises:
          RequestError: as `generate`; the model has no template; or the template refuses the messages.
        """
        listed = _listed("messages", messages)
        if not listed:
            raise RequestError("messages is empty: give at least one", "messages")
        conversations = [listed] if isinstance(listed[0], Mapping) else listed
        token_ids = [tuple(self.engine.tokenizer.encode_chat(m)) for m in conversations]
        return self._run([None] * len(token_ids), token_ids, sampling_params, use_tqdm)

    def _run(
        self,
        texts: Sequence[str | None],
        token_ids: Sequence[tuple[int, ...]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = SamplingParams() if sampling_params is None else sampling_params
        each = (
            [params] * len(texts)
            if isinstance(params, SamplingParams)
            else _listed("sampling_params", params)
        )
        if not all(isinstance(p, SamplingParams) for p in each):
            raise RequestError("sampling_params must be SamplingParams, or a list of them", "sampling_params")
        if len(each) != len(texts):
            raise RequestError(
                f"sampling_params has {len(each)} entries for {len(texts)} prompts: give one, or one each",
                "sampling_params",
            )
        now_s = time.monotonic()
        requests = [
            Request(f"llm-{now_s}-{i}", ids, p, now_s)
            for i, (ids, p) in enumerate(zip(token_ids, each, strict=True))
        ]
        if not self._may_run:
            raise ConfigError("hosts: on several hosts LLM must be used in a with statement, which ends them")
        self.engine.agree({"prompts": _digest(token_ids), "sampling_params": _digest(each)})
        collected: dict[str, list[TokenOutput]] = {r.request_id: [] for r in requests}
        finished = False
        try:
            for request in requests:
                self.engine.add_request(request)
            with tqdm(total=len(requests), unit="request", disable=None if use_tqdm else True) as bar:
                while self.engine.has_unfinished():
                    for output in self.engine.step():
                        collected[output.request_id].append(output)
                        bar.update(output.request_finished)
            finished = True
        finally:
            if not finished:  # refused or interrupted: leave the engine as it was found
                for request in requests:
                    self.engine.abort(request.request_id)
        return [_joined(r, t, collected[r.request_id]) for r, t in zip(requests, texts, strict=True)]


def _digest(values: Sequence[Any]) -> str:
    """What hosts compare."""
    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:16]


def _listed(name: str, values: Any) -> list[Any]:
    """Any iterable but a mapping as a list; raises RequestError, which names the argument."""
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{name} is of type {type(values).__name__}; give a list", name)
    return list(values)


def _joined(request: Request, text: str | None, outputs: list[TokenOutput]) -> RequestOutput:
    """One request's outputs, put together."""
    by_index: dict[int, list[TokenOutput]] = {i: [] for i in range(request.params.n)}
    for output in outputs:
        by_index[output.index].append(output)
    prompt_logprobs = next((o.prompt_logprobs for o in by_index[0] if o.prompt_logprobs is not None), None)
    return RequestOutput(
        request_id=request.request_id,
        prompt=text,
        prompt_token_ids=request.prompt_token_ids,
        outputs=tuple(_completion(request, i, parts) for i, parts in by_index.items()),
        prompt_logprobs=prompt_logprobs,
        metrics=outputs[-1].metrics,
    )


def _completion(request: Request, index: int, parts: list[TokenOutput]) -> CompletionOutput:
    logprobs: tuple[TokenLogprobs, ...] = tuple(entry for part in parts for entry in part.logprobs)
    last = parts[-1]
    return CompletionOutput(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=tuple(i for part in parts for i in part.token_ids),
        logprobs=None if request.params.logprobs is None else logprobs,
        finish_reason=last.finish_reason or FinishReason.ABORT,
        stop_reason=last.stop_reason,
    )

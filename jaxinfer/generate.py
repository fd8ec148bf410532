"""Answers a prompt, or holds a conversation: `python -m jaxinfer.generate --model=demo --prompt=...`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer import cli
from jaxinfer.flags import GenerateOptions, generate_options
from jaxinfer.text import Detokenizer
from jaxinfer.types import Request, RequestError, TokenOutput

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Engine


@dataclass(frozen=True)
class Answer:
    """One finished answer and how long its stages took, in seconds."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: tuple[int, ...]
    stages: tuple[tuple[str, float], ...]
    ttft_s: float
    itl_s: float | None  # None where there was one token

    @property
    def figures(self) -> dict[str, float | None]:
        """Latencies in seconds; tokens a second."""
        seconds = dict(self.stages)
        return {
            "ttft_s": self.ttft_s,
            "itl_s": self.itl_s,
            "prefill_tok_per_s": self.num_prompt_tokens / max(seconds["prefill"], 1e-9),
            "decode_tok_per_s": None if self.itl_s is None else 1 / max(self.itl_s, 1e-9),
        }


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    return cli.run(generate_options, _generate, argv)


def _generate(options: GenerateOptions) -> int:
    prompt = options.prompt
    if prompt is None and not options.chat:
        prompt = _from_stdin(sys.stdin.read)
    if prompt == "":
        raise RequestError("the prompt is empty; give --prompt or text on stdin")
    with cli.started(options.engine) as engine:
        if options.chat:
            _converse(engine, options, [prompt] if prompt is not None else _turns())
        else:
            start_s = time.monotonic()
            ids = engine.tokenizer.encode(prompt or "")
            _report(engine, options, _answer(engine, ids, options, start_s))
    return 0


def _from_stdin(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is no text in {error.encoding}: {error.reason}") from error


def _turns() -> Iterator[str]:
    """What the user says, a line each; empty lines are left out."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = _from_stdin(sys.stdin.readline)
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _converse(engine: Engine, options: GenerateOptions, turns: Iterator[str] | list[str]) -> None:
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        start_s = time.monotonic()
        ids = engine.tokenizer.encode_chat(messages)
        answer = _answer(engine, ids, options, start_s)
        messages.append({"role": "assistant", "content": answer.text})
        _report(engine, options, answer)


def _answer(engine: Engine, ids: Sequence[int], options: GenerateOptions, start_s: float) -> Answer:
    """Runs one request to its end, and shows its text as it comes."""
    arrival_s = time.monotonic()
    params = options.sampling.params_for(len(ids), engine.scheduler_config.max_model_len)
    request = Request(f"generate-{arrival_s}", tuple(ids), params, arrival_s)
    engine.add_request(request)
    outputs: list[TokenOutput] = []
    while engine.has_unfinished():
        for output in engine.step():
            outputs.append(output)
            if output.text and not options.json:
                sys.stdout.write(output.text)
                sys.stdout.flush()
    if not options.json:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return _timed(engine, request, outputs, start_s)


def _timed(engine: Engine, request: Request, outputs: list[TokenOutput], start_s: float) -> Answer:
    token_ids = tuple(i for output in outputs for i in output.token_ids)
    last = outputs[-1]
    metrics = last.metrics
    scheduled_s, first_s, end_s = (
        metrics.first_scheduled_time_s,
        metrics.first_token_time_s,
        metrics.finished_time_s,
    )
    if scheduled_s is None or first_s is None or end_s is None or last.finish_reason is None:
        raise RuntimeError(f"the engine ended request {request.request_id} without its times")
    # The engine decodes text between steps; once more, alone, is what it took of the decode stage.
    before_s = time.monotonic()
    detokenizer = Detokenizer(engine.tokenizer, request.params.skip_special_tokens, continuation=True)
    for token_id in token_ids:
        detokenizer.add(token_id)
    detokenise_s = time.monotonic() - before_s
    return Answer(
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason.value,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=metrics.num_cached_tokens,
        token_ids=token_ids,
        stages=(
            ("tokenise", request.arrival_time_s - start_s),
            ("queue", scheduled_s - request.arrival_time_s),
            ("prefill", first_s - scheduled_s),
            ("decode", end_s - first_s),
            ("detokenise", detokenise_s),
        ),
        ttft_s=first_s - start_s,
        itl_s=(end_s - first_s) / (len(token_ids) - 1) if len(token_ids) > 1 else None,
    )


def _report(engine: Engine, options: GenerateOptions, answer: Answer) -> None:
    stages = dict((*engine.timeline, *answer.stages))
    if options.json:
        print(json.dumps(_as_json(options.engine.model, answer, stages), ensure_ascii=False), flush=True)
    if not options.stats:
        return
    lines = [f"{name:<20} {seconds:10.4f} s" for name, seconds in stages.items()]
    lines.append(f"{'prompt':<20} {answer.num_prompt_tokens:10} tokens, {answer.num_cached_tokens} cached")
    lines.append(f"{'output':<20} {len(answer.token_ids):10} tokens, ended by {answer.finish_reason}")
    for name, value in answer.figures.items():
        if value is not None:
            milliseconds = name.endswith("_s") and not name.endswith("per_s")
            lines.append(
                f"{name.removesuffix('_s').upper():<20} {value * 1e3:10.2f} ms"
                if milliseconds
                else f"{name.removesuffix('_tok_per_s'):<20} {value:10.2f} tok/s"
            )
    sys.stderr.write("\n".join(lines) + "\n")


def _as_json(model: str, answer: Answer, stages: dict[str, float]) -> dict[str, Any]:
    return {
        "model": model,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": answer.num_cached_tokens,
        },
        "stages_s": stages,
        **answer.figures,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

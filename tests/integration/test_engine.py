"""The engine on tiny models: the same tokens however they are computed, and the parameters honoured.

The oracle is a naive loop that runs the whole prompt again for each token, with dense attention and
no cache; its logits are held to Hugging Face's by tests/golden.
"""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ConfigError
from jaxinfer.engine.engine import Engine
from jaxinfer.models.families import load_model_config
from jaxinfer.models.transformer import Transformer
from jaxinfer.models.weights import load_model
from jaxinfer.types import FinishReason, RequestError, SamplingParams
from jaxinfer_checkpoints import open_checkpoint
from jaxinfer_kernels import reference
from tests.integration.engines import MODELS, make_engine, run, tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=7, max_tokens=20, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 150, n).tolist() for n in (5, 1, 31, 32, 33, 70, 8, 90, 16, 3, 47, 64)]
# Of what takes long, the fast tests have the extremes: the family with windows, and the tightest pool.
FAMILIES = [
    pytest.param(name, marks=() if name == "gemma3" else pytest.mark.slow)
    for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3")
]


@pytest.fixture(scope="module")
def engine(tokenizer: Path) -> Engine:
    return make_engine(tokenizer)


@jax.jit
def naive_logits(model: Transformer, token_ids: jax.Array) -> jax.Array:
    """[T] -> [T, V]."""

    def attend(q, k, v, kv_pages, metadata, **options):
        return reference.dense_attention(q, k, v, **options), kv_pages

    pages = (None,) * model.config.num_hidden_layers
    hidden, _ = model(token_ids, jnp.arange(token_ids.shape[0]), pages, None, attend)
    return model.logits(hidden)


def naive_greedy(model_name: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Recomputes everything for each token."""
    reader = open_checkpoint(MODELS / model_name)
    model = load_model(reader, load_model_config(reader), jnp.dtype("float32"))
    length = max(map(len, prompts)) + count
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            padded = jnp.asarray(ids + [0] * (length - len(ids)), jnp.int32)  # causal: padding comes after
            ids.append(int(np.argmax(naive_logits(model, padded)[len(ids) - 1])))
        answers.append(ids[len(prompt) :])
    return answers


@pytest.mark.parametrize("model", FAMILIES)
def test_greedy_equals_the_naive_loop(model: str, tokenizer: Path) -> None:
    """Prefill, decode, chunks and windows against recomputing it all; a batch of different lengths."""
    engine = make_engine(tokenizer, model)
    chosen = (0, 2, 5, 7)
    outputs = run(engine, {f"{i}": (PROMPTS[i], GREEDY) for i in chosen})
    assert engine.stats().compilations_serving == 0
    expected = naive_greedy(model, [PROMPTS[i] for i in chosen], 20)
    assert [tokens(outputs[f"{i}"]) for i in chosen] == expected


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[tuple[int, int], list[int]]:
    """Each prompt by itself, greedy and seeded."""
    return {
        (i, params.seed or 0): tokens(run(engine, {"alone": (prompt, params)})["alone"])
        for i, prompt in enumerate(PROMPTS)
        for params in (GREEDY, SEEDED)
    }


def mixed_requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """32 requests, half of them seeded."""
    return {
        f"{i}/{params.seed or 0}/{copy}": (prompt, params)
        for i, prompt in enumerate(PROMPTS)
        for copy, params in enumerate((GREEDY, SEEDED, GREEDY))
    }


def assert_as_alone(outputs: dict, alone: dict) -> None:
    for key, parts in outputs.items():
        i, seed, _ = key.split("/")
        assert tokens(parts) == alone[int(i), int(seed)], key


WAYS: dict[str, dict[str, Any]] = {
    "batch of 32": {"max_num_seqs": 32},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "chunks of 32": {"max_num_batched_tokens": 32},
    "no prefix cache": {"enable_prefix_caching": False},
    "other pages": {"page_size": 32},
    "preemption": {"max_num_seqs": 8, "num_pages": 17},
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way == "preemption" else pytest.mark.slow) for way in WAYS],
)
def test_tokens_do_not_depend_on_how(way: str, tokenizer: Path, alone: dict) -> None:
    engine = make_engine(tokenizer, **WAYS[way])
    assert_as_alone(run(engine, mixed_requests()), alone)
    stats = engine.stats()
    assert stats.compilations_serving == 0
    assert stats.kv_cache_usage == 0.0
    assert (stats.num_preemptions > 0) == (way == "preemption")


def test_cold_or_after_a_prefix_hit(engine: Engine, alone: dict) -> None:
    before = engine.stats().prefix_cache_hits
    for key, request in mixed_requests().items():
        assert_as_alone(run(engine, {key: request}), alone)
    assert engine.stats().prefix_cache_hits > before


def test_any_arrival_order(engine: Engine, alone: dict) -> None:
    requests = list(mixed_requests().items())
    for seed in range(3):
        random.Random(seed).shuffle(requests)
        assert_as_alone(run(engine, dict(requests)), alone)


@pytest.mark.parametrize("max_num_seqs", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_nan_in_unused_pages_changes_nothing(max_num_seqs: int, tokenizer: Path, alone: dict) -> None:
    """Every page starts as NaN, and the null page stays so."""
    engine = make_engine(tokenizer, max_num_seqs=max_num_seqs, enable_prefix_caching=False)
    runner = engine._runner
    runner.kv_pages = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), runner.kv_pages)

    @partial(jax.jit, donate_argnums=0)
    def poison(kv_pages: Any) -> Any:
        return jax.tree.map(lambda pages: pages.at[0].set(jnp.nan), kv_pages)

    def poison_the_null_page(step: int) -> None:
        runner.kv_pages = poison(runner.kv_pages)

    assert_as_alone(run(engine, mixed_requests(), poison_the_null_page), alone)


def test_abort_at_any_moment_leaves_the_others_alone(engine: Engine, alone: dict) -> None:
    requests = mixed_requests()
    doomed = random.Random(1).sample(sorted(requests), 12)

    def abort_one(step: int) -> None:
        if doomed:
            engine.abort(doomed.pop())

    outputs = run(engine, requests, abort_one)
    ended = {key: parts for key, parts in outputs.items() if parts[-1].request_finished}
    assert len(ended) >= len(requests) - 12
    assert_as_alone(ended, alone)
    assert engine.stats().kv_cache_usage == 0.0


def test_n_completions_have_their_own_seeds(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True)
    together = run(engine, {"n": (PROMPTS[2], params)})
    singles = [SamplingParams(temperature=1.0, seed=3 + i, max_tokens=12, ignore_eos=True) for i in range(3)]
    for i, single in enumerate(singles):
        want = tokens(run(engine, {"single": (PROMPTS[2], single)})["single"])
        assert tokens(together["n" if i == 0 else f"n/{i}"]) == want
    assert len({tuple(tokens(parts)) for parts in together.values()}) == 3


def last_of(engine: Engine, **changes: object) -> tuple[list[int], FinishReason | None, object]:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | changes))  # type: ignore[arg-type]
    outputs = run(engine, {"r": (PROMPTS[0], params)})["r"]
    return tokens(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason


def test_what_ends_an_answer(engine: Engine) -> None:
    free, reason, _ = last_of(engine)
    assert (len(free), reason) == (12, FinishReason.LENGTH)
    stop = free[4]
    first = free.index(stop)
    assert last_of(engine, stop_token_ids=(stop,)) == (free[: first + 1], FinishReason.STOP, stop)
    held, _, _ = last_of(engine, stop_token_ids=(stop,), min_tokens=first + 2)
    assert held[:first] == free[:first]
    assert held[first] != stop
    assert len(held) >= first + 2


def test_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    text = "".join(o.text for o in run(engine, {"r": (PROMPTS[0], params)})["r"])
    stop = text[3:5]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=(stop,))
    outputs = run(engine, {"r": (PROMPTS[0], params)})["r"]
    assert "".join(o.text for o in outputs) == text[: text.index(stop)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)


def test_logit_bias_and_penalties_reach_the_sampler(engine: Engine) -> None:
    free, _, _ = last_of(engine)
    assert last_of(engine, logit_bias={11: 100.0})[0] == [11] * 12
    assert last_of(engine, logit_bias={free[0]: -100.0})[0][0] != free[0]
    distinct = last_of(engine, logit_bias={11: 6.0}, presence_penalty=2.0, frequency_penalty=2.0)[0]
    repeated = last_of(engine, logit_bias={11: 6.0})[0]
    assert repeated.count(11) > distinct.count(11)


def test_penalties_survive_preemption(tokenizer: Path) -> None:
    """The counts of a sequence that is computed again are set from its prompt and its output."""
    params = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5
    )
    requests = {f"{i}": (PROMPTS[i], params) for i in range(8)}
    roomy, tight = make_engine(tokenizer), make_engine(tokenizer, max_num_seqs=8, num_pages=17)
    want = {key: tokens(parts) for key, parts in run(roomy, requests).items()}
    assert {key: tokens(parts) for key, parts in run(tight, requests).items()} == want
    assert tight.stats().num_preemptions > 0


def test_logprobs_of_prompt_and_answer(engine: Engine) -> None:
    """Those of the prompt, over several chunks, equal those of the same tokens when they are generated."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    outputs = run(engine, {"r": (PROMPTS[7], params)})["r"]
    prompt = outputs[0].prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert [entry.token_id for entry in prompt[1:] if entry is not None] == PROMPTS[7][1:]
    generated = [entry for output in outputs for entry in output.logprobs]
    assert [entry.rank for entry in generated] == [1] * 6
    longer = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=3)
    again = run(engine, {"r": (PROMPTS[7] + tokens(outputs), longer)})["r"][0].prompt_logprobs
    assert again is not None
    for entry, want in zip(again[len(PROMPTS[7]) :], generated, strict=True):
        assert entry is not None
        assert entry.token_id == want.token_id
        assert entry.logprob == pytest.approx(want.logprob, abs=1e-5)
        assert [i for i, _ in entry.top] == [i for i, _ in want.top]


@pytest.mark.slow
def test_prompt_logprobs_survive_preemption(engine: Engine, tokenizer: Path) -> None:
    """A prompt that is preempted between two of its chunks is computed again, from its beginning."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    asks = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    others = {f"{i}": (PROMPTS[i][:8], greedy) for i in range(3)}
    requests = others | {"long": ([i % 200 for i in range(1, 101)], asks)}
    # Each decode takes a page, and none is left when half of the long prompt's chunks are computed.
    tight = make_engine(tokenizer, max_num_batched_tokens=32, max_model_len=112, page_size=1, num_pages=125)
    roomy_first, tight_first = (run(e, requests)["long"][0] for e in (engine, tight))
    assert (roomy_first.metrics.num_preemptions, tight_first.metrics.num_preemptions) == (0, 1)
    want, got = roomy_first.prompt_logprobs, tight_first.prompt_logprobs
    assert want is not None
    assert got is not None
    assert (len(want), len(got), want[0], got[0]) == (100, 100, None, None)
    for one, other in zip(want[1:], got[1:], strict=True):
        assert one is not None
        assert other is not None
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ([], GREEDY, "prompt", "empty"),
        ([1] * 128, GREEDY, "prompt", "128 tokens.*128"),
        ([1] * 120, GREEDY, "max_tokens", "120 tokens and max_tokens=20.*128"),
        ([1, 10**6], GREEDY, "prompt", "1000000"),
        ([1], SamplingParams(stop_token_ids=(10**6,)), "stop_token_ids", "1000000"),
        ([1], SamplingParams(logit_bias={-1: 1.0}), "logit_bias", "-1"),
    ],
)
def test_a_bad_request_is_refused_by_name(
    engine: Engine, prompt: list[int], params: SamplingParams, param: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as error:
        run(engine, {"bad": (prompt, params)})
    assert error.value.param == param
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": "4x4"}, "mesh=4x4 needs 16 devices, and 8 .*device_count=16"),
        ({"mesh": "1x5"}, "num_attention_heads=4: use 1 to 4"),
        ({"page_size": 24}, "page_size=24"),
        ({"max_model_len": 10**6}, "max_model_len=1000000"),
        ({"max_model_len": 1}, "max_model_len=1 must be 2 or more"),
        ({"num_pages": 1}, "num_pages=1 must be 2 or more"),
        ({"num_pages": 4}, "num_pages"),
        ({"num_pages": 10**12}, "num_pages=1000000000000 make"),
        ({"kv_cache_bytes": 1}, "0 fit: raise kv_cache_bytes"),
        ({"rope_scaling": '{"rope_type": "linear", "factor": "x"}'}, "could not convert.*'x'"),
        ({"compilation_cache_dir": "/dev/null/x"}, "compilation_cache_dir='/dev/null/x'"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(tokenizer: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine(tokenizer, **changes)


def test_hollow_programs_leave_the_hosts_work(tokenizer: Path) -> None:
    """Every request gets its tokens, in as many steps, and the device's state stays what it was."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    requests = {f"{i}": (prompt, params) for i, prompt in enumerate(PROMPTS)}
    real, hollow = make_engine(tokenizer), make_engine(tokenizer)
    hollow.compute_nothing()
    before = [np.array(leaf) for leaf in jax.tree.leaves(hollow._runner.kv_pages)]
    run(real, requests)
    outputs = run(hollow, requests)
    assert {key: tokens(parts) for key, parts in outputs.items()} == {key: [0] * 20 for key in requests}
    assert hollow.stats().num_steps == real.stats().num_steps
    for was, leaf in zip(before, jax.tree.leaves(hollow._runner.kv_pages), strict=True):
        np.testing.assert_array_equal(leaf, was)
    assert hollow.stats().compilations_serving == 0


def test_random_weights_need_no_checkpoint_values(tokenizer: Path) -> None:
    dummy = make_engine(tokenizer, load_format="dummy")
    out = run(dummy, {"r": (PROMPTS[0], GREEDY)})["r"]
    assert len(tokens(out)) == 20


def test_llm_returns_results_in_the_order_given(tokenizer: Path) -> None:
    from jaxinfer import LLM

    llm = LLM(
        str(MODELS / "llama"),
        tokenizer=str(tokenizer),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        page_size=8,
    )
    results = llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
    assert [r.prompt_token_ids for r in results] == [tuple(p) for p in PROMPTS[:6]]
    single = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in PROMPTS[:6]]
    assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in single]
    with pytest.raises(RequestError, match="empty"):
        llm.generate([PROMPTS[0], []], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished()
    with pytest.raises(RequestError, match="sampling_params has 0 entries for 1"):
        llm.generate(PROMPTS[0], [], use_tqdm=False)
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([], use_tqdm=False)
    assert llm.engine.config.compilation_cache_dir == os.environ["JAX_COMPILATION_CACHE_DIR"]


def test_llm_takes_what_can_only_mean_one_thing(tokenizer: Path) -> None:
    from jaxinfer import LLM

    llm = LLM(
        str(MODELS / "llama"),
        tokenizer=str(tokenizer),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        page_size=8,
    )
    want = [r.outputs[0].token_ids for r in llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)]
    arrays = [np.array(p) for p in PROMPTS[:2]]
    for prompts in (arrays, iter(PROMPTS[:2]), (list(a) for a in arrays)):
        results = llm.generate(prompts, iter([GREEDY] * 2), use_tqdm=False)  # type: ignore[arg-type]
        assert [r.outputs[0].token_ids for r in results] == want
    assert llm.generate(arrays[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == want[0]  # type: ignore[arg-type]
    for prompts, words in (
        (5, "prompts is of type int"),
        ({"prompt": "x"}, "prompts is of type dict"),
        ([5, "x"], "prompts=5 must be a sequence of integers"),
        ([[1.0]], "prompts=.1.0. must be"),
        ([True], "prompts=.True. must be"),
        ([b"x"], "prompts=b'x' must be"),
        ([None], "prompts=None must be"),
        ("", "prompt is empty"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    for params in ({"n": 1}, ["x"], "greedy"):
        with pytest.raises(RequestError, match="sampling_params"):
            llm.generate("x", params, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="messages is of type int"):
        llm.chat(5, use_tqdm=False)  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().compilations_serving == 0

"""Real models against known right answers: logits of another implementation on the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, SamplingParams

REFERENCES = Path(__file__).parents[1] / "golden" / "references"
LOGPROB_TOLERANCE = 0.02
SAFE_MARGIN = 0.05  # greedy ids must agree up to the first step whose best two are closer

pytestmark = pytest.mark.slow


def check(llm: LLM, case: dict[str, Any]) -> None:
    assert llm.engine.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
    count = len(case["greedy"])
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=5, prompt_logprobs=0)
    result = llm.generate(case["prompt"], params, use_tqdm=False)[0]
    answer = result.outputs[0]
    assert answer.logprobs is not None
    assert result.prompt_logprobs is not None
    first = dict(answer.logprobs[0].top)
    assert sorted(first) == sorted(case["top_ids"])
    for token_id, logprob in zip(case["top_ids"], case["top_logprobs"], strict=True):
        assert first[token_id] == pytest.approx(logprob, abs=LOGPROB_TOLERANCE)
    prompt = [entry.logprob for entry in result.prompt_logprobs if entry is not None]
    assert prompt == pytest.approx(case["prompt_logprobs"], abs=LOGPROB_TOLERANCE)
    margins = [entry.top[0][1] - entry.top[1][1] for entry in answer.logprobs]
    safe = next((i for i, margin in enumerate(margins) if margin < SAFE_MARGIN), count)
    assert list(answer.token_ids[:safe]) == case["greedy"][:safe]


@pytest.mark.parametrize(
    ("fixture", "reference"),
    [("demo_path", "smollm2-135m-instruct.q4_1.json"), ("gemma_path", "gemma-3-270m.q4_k_m.json")],
)
def test_references(fixture: str, reference: str, request: pytest.FixtureRequest) -> None:
    cases = json.loads((REFERENCES / reference).read_text(encoding="utf-8"))["cases"]
    path: Path = request.getfixturevalue(fixture)
    llm = LLM(str(path), max_num_seqs=1, max_num_batched_tokens=32, max_model_len=128)
    assert len(cases) >= 4
    for case in cases:
        check(llm, case)

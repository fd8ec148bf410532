"""What host 0 tells the others' engines."""

from __future__ import annotations

import json
from dataclasses import asdict

from jaxinfer.engine.engine import request_from_dict
from jaxinfer.types import Request, SamplingParams


def test_a_request_comes_out_of_json_as_it_went_in() -> None:
    params = SamplingParams(
        temperature=0.1 + 0.2,
        top_k=3,
        logit_bias={7: -1.5, 300: 2.0},
        stop=("\n", "\U0001f600"),
        stop_token_ids=(1, 2),
        seed=-(2**63),
        max_tokens=None,
        prompt_logprobs=0,
    )
    for request in (
        Request("a", (1, 2, 3), params, arrival_time_s=12345.678901234567, priority=-1),
        Request("b", (0,), SamplingParams(), 0.0),
    ):
        assert request_from_dict(json.loads(json.dumps(asdict(request)))) == request

"""What `SamplingParams` takes from Python callers, and what it refuses by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxinfer.types import RequestError, SamplingParams


def test_numpy_and_none_become_pythons_own() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        max_tokens=np.int32(7),  # type: ignore[arg-type]
        stop=None,  # type: ignore[arg-type]
        stop_token_ids=np.array([4, 5]),  # type: ignore[arg-type]
        logit_bias={np.int64(1): np.float64(2.0)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=3, max_tokens=7, stop_token_ids=(4, 5), logit_bias={1: 2.0}
    )
    assert [type(i) for i in (params.top_k, *params.stop_token_ids, *params.logit_bias)] == [int] * 4
    assert SamplingParams(logit_bias=None, stop_token_ids=None, stop=[]) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", float("nan")),
        ("top_p", 10**400),
        ("repetition_penalty", 1e-45),  # 0 in float32
        ("repetition_penalty", 0.0),
        ("top_k", 1.0),
        ("top_k", -1),
        ("n", None),
        ("n", 2.0),
        ("max_tokens", "3"),
        ("max_tokens", 0),
        ("seed", 2**63),
        ("seed", 1.5),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
        ("logit_bias", [1]),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1.0: 1.0}),
        ("logit_bias", {1: "x"}),
        ("logit_bias", dict.fromkeys(range(301), 1.0)),
        ("stop", 5),
        ("stop", ["a", None]),
        ("stop", [""]),
        ("stop", b"a"),
        ("stop", ["a"] * 65),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", list(range(65))),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert str(error.value).startswith(name)
    assert len(str(error.value)) < 250

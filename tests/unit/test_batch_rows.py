"""A line that cannot be taken, or could not be written back, becomes a row with an error."""

from __future__ import annotations

import json

import pytest

from jaxinfer.batch import make_row
from jaxinfer.flags import batch_options
from tests.fake_engine import FakeEngine


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "hi", "note": "\\ud800"}',
        b'{"prompt": "hi", "x": NaN}',
        b"[" * 100_000,
        b"\xff\xfe",
        b"not json",
    ],
)
def test_a_bad_line_is_a_row_with_an_error(line: bytes) -> None:
    options = batch_options(["--model=demo", "--input=in.jsonl", "--output=out.jsonl"])
    row = make_row(line, 3, FakeEngine(), options.sampling)  # type: ignore[arg-type]
    assert row.error is not None
    written = json.dumps(row.result(), ensure_ascii=False).encode()
    assert b"line 3 is not JSON" in written

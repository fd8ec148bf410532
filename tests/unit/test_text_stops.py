"""Stop strings: the same result under any chunking, and nothing held back without need."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxinfer.text import StopStrings

_few = st.text(alphabet="ab\n", max_size=30)
_stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Looks after every character whether a stop string is complete; the longest of several wins."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def chunks(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@given(_few, _stops, st.booleans(), st.lists(st.integers(0, 30), max_size=8))
@example("abab", ["bab", "ab"], False, [1, 2, 3])
@example("aabb", ["abc", "b"], True, [2])
def test_any_chunking_gives_the_naive_result(text, stops, include, cuts):
    stream = StopStrings(tuple(stops), include)
    joined = "".join([*(stream.feed(chunk) for chunk in chunks(text, cuts)), stream.flush()])
    assert (joined, stream.matched) == naive(text, stops, include)


@given(_few, _stops)
def test_holds_back_exactly_what_may_become_a_stop_string(text, stops):
    stream = StopStrings(tuple(stops), include=False)
    emitted = ""
    for end, char in enumerate(text, start=1):
        emitted += stream.feed(char)
        if stream.matched is not None:
            break
        seen = text[:end]
        needed = max((n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])), default=0)
        assert len(seen) - len(emitted) == needed


def test_the_longest_of_those_that_end_together():
    stream = StopStrings(("b", "ab", "xab"), include=False)
    assert stream.feed("xa") == ""
    assert stream.feed("b!") == ""
    assert stream.matched == "xab"


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
def test_nothing_comes_after_a_match(include, text):
    stream = StopStrings(("STOP",), include)
    pieces = [stream.feed(piece) for piece in ("one S", "TO", "P two", " STOP three")]
    assert "".join(pieces) + stream.flush() == text


def test_without_stop_strings_all_text_passes():
    stream = StopStrings((), include=False)
    assert stream.feed("anything") == "anything"
    assert stream.flush() == ""
    assert stream.matched is None

"""Incremental decoding: the pieces joined are the whole decoded at once, whatever the ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.text import Detokenizer, Tokenizer
from jaxinfer.text.gguf_tokenizer import build_backend
from tests.unit import text_samples
from tests.unit.text_samples import byte_level, sentencepiece

_ids = st.lists(st.integers(0, 600), max_size=40)  # some beyond the vocabularies, as padded models give


def incremental(tokenizer: Tokenizer, ids: list[int], skip: bool, continuation: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, continuation)
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
@given(ids=_ids, skip=st.booleans(), continuation=st.booleans())
def test_joined_pieces_are_the_whole(tokenizer, ids, skip, continuation):
    whole = tokenizer.decode(ids, skip_special_tokens=skip, continuation=continuation)
    assert "".join(incremental(tokenizer, ids, skip, continuation)) == whole


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not any(i in tokenizer.special_token_ids for i in ids) and "▁" not in text:
        assert "".join(incremental(tokenizer, ids, skip=True)) == text


@given(ids=st.lists(st.integers(0, 263), max_size=40))
def test_byte_level_decodes_as_the_tokenizers_package(ids):
    backend = build_backend(text_samples.byte_level_metadata())
    assert byte_level().decode(ids) == backend.decode(ids)


@given(st.binary(max_size=20))
def test_invalid_bytes_become_replacement_characters(data):
    tokenizer = sentencepiece()
    tokens = text_samples.sentencepiece_metadata()["tokenizer.ggml.tokens"]
    ids = [tokens.index(f"<0x{byte:02X}>") for byte in data]
    expected = data.decode("utf-8", "replace")
    assert "".join(incremental(tokenizer, ids, skip=True, continuation=True)) == expected


def test_a_character_comes_with_its_last_byte():
    tokens = text_samples.sentencepiece_metadata()["tokenizer.ggml.tokens"]
    ids = [tokens.index(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert incremental(sentencepiece(), ids, skip=True) == ["", "", "€", ""]
    assert incremental(sentencepiece(), ids[:2], skip=True) == ["", "", "\ufffd"]


def test_special_tokens_do_not_break_a_character_when_skipped():
    tokenizer = byte_level()
    first, second = tokenizer.encode("ß", add_special_tokens=False)
    ids = [first, tokenizer.bos_token_id, second]
    assert "".join(incremental(tokenizer, ids, skip=True)) == "ß"
    assert "".join(incremental(tokenizer, ids, skip=False)) == "\ufffd<s>\ufffd"


def test_leading_space_belongs_to_a_continuation_only():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("the sea", add_special_tokens=False)
    assert "".join(incremental(tokenizer, ids, skip=True)) == "the sea"
    assert "".join(incremental(tokenizer, ids, skip=True, continuation=True)) == " the sea"


def test_added_tokens_decode_to_their_text():
    tokenizer = byte_level()
    ids = tokenizer.encode("a｜é｜<tool>b", add_special_tokens=False)
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a｜é｜<tool>b"

"""Tokenizers rebuilt from GGUF metadata, against llama.cpp, SentencePiece and the reference prompts."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config import ConfigError
from jaxinfer.text import Detokenizer, Tokenizer, load_tokenizer
from jaxinfer.text.gguf_tokenizer import PRE_TOKENIZERS
from jaxinfer.text.tokenizer import tokenizer_from_gguf
from jaxinfer_checkpoints import open_checkpoint
from tests.unit.text_samples import (
    GOLDEN,
    byte_level_metadata,
    golden,
    sentencepiece,
    sentencepiece_metadata,
)

_LLAMA_CPP = golden("text/llama_cpp.json")
_SENTENCEPIECE = golden("text/sentencepiece.json")


def metadata_of(path: Path) -> Mapping[str, Any]:
    reader = open_checkpoint(path)
    try:
        return dict(reader.config)
    finally:
        reader.close()


def wrong_ids(tokenizer: Tokenizer, texts: list[str], expected: list[list[int]]) -> list[str]:
    """Texts whose ids differ."""
    pairs = zip(texts, expected, strict=True)
    return [text for text, ids in pairs if tokenizer.encode(text, add_special_tokens=False) != ids]


def references(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / "references" / name).read_text(encoding="utf-8"))["cases"]


def test_sentencepiece_ids():
    assert wrong_ids(sentencepiece(), _SENTENCEPIECE["texts"], _SENTENCEPIECE["ids"]) == []


def test_sentencepiece_decoding():
    decoded = [sentencepiece().decode(ids) for ids in _SENTENCEPIECE["decoded_ids"]]
    assert decoded == _SENTENCEPIECE["decoded"]


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'my-pre'.*command-r, .*llama-bpe, .*tekken"):
        tokenizer_from_gguf(byte_level_metadata(pre="my-pre"))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        (byte_level_metadata(model="bert"), "tokenizer.ggml.model is 'bert'"),
        ({}, "tokenizer.ggml.model is None"),
        ({"tokenizer.ggml.model": "gpt2"}, "no tokenizer.ggml.tokens"),
        (byte_level_metadata(tokens=["a", "b", "a"]), "'a' twice"),
        (byte_level_metadata(token_type=[1]), "token_type has 1 entries"),
        (byte_level_metadata(merges=["no such"]), "cannot be rebuilt"),
        (sentencepiece_metadata(scores=[0.0]), "scores has 1 entries"),
    ],
)
def test_broken_metadata_are_refused_by_name(metadata, named):
    with pytest.raises(ConfigError, match=named):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(
    ("metadata", "begins_with_bos"),
    [
        (byte_level_metadata(), False),
        (byte_level_metadata(pre="llama-bpe"), True),
        (byte_level_metadata(pre="tekken"), True),
        (byte_level_metadata(pre="llama-bpe", add_bos_token=False), False),
        (byte_level_metadata(add_bos_token=True), True),
        (byte_level_metadata(add_bos_token=True, bos_token_id=None), False),
        (sentencepiece_metadata(), True),
        (sentencepiece_metadata(add_bos_token=False), False),
    ],
)
def test_bos_is_added_as_in_llama_cpp(metadata, begins_with_bos):
    tokenizer = tokenizer_from_gguf(metadata)
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [tokenizer.bos_token_id] * begins_with_bos + bare


def test_bos_is_never_doubled_and_never_missing():
    template = "{{ bos_token if with_bos }}{{ messages[0].content }}"
    metadata = {**byte_level_metadata(add_bos_token=True), "tokenizer.chat_template": template}
    tokenizer = tokenizer_from_gguf(metadata)
    messages = [{"role": "user", "content": "hello"}]
    expected = tokenizer.encode("hello")
    assert expected[0] == tokenizer.bos_token_id
    assert tokenizer.encode("<s>hello") == expected
    assert tokenizer.encode_chat(messages, with_bos=True) == expected
    assert tokenizer.encode_chat(messages, with_bos=False) == expected
    assert tokenizer.encode("<s>hello", add_special_tokens=False) == expected


def test_eos_is_appended_once_where_the_file_asks_for_it():
    tokenizer = tokenizer_from_gguf(byte_level_metadata(add_eos_token=True))
    eos = byte_level_metadata()["tokenizer.ggml.eos_token_id"]
    assert tokenizer.encode("hello")[-1] == eos
    assert tokenizer.encode("hello</s>") == tokenizer.encode("hello")
    assert tokenizer.encode("") == [eos]


def test_ends_of_turn_count_only_where_they_are_special():
    metadata = byte_level_metadata(eot_token_id=3)
    tokens, types = metadata["tokenizer.ggml.tokens"], list(metadata["tokenizer.ggml.token_type"])
    eos, im_end = tokens.index("</s>"), tokens.index("<|im_end|>")
    assert tokenizer_from_gguf(metadata).eos_token_ids == {3, eos, im_end}
    types[im_end] = 4
    plain = tokenizer_from_gguf({**metadata, "tokenizer.ggml.token_type": types})
    assert plain.eos_token_ids == {3, eos}


@pytest.fixture(scope="module")
def demo_metadata(demo_path: Path) -> Mapping[str, Any]:
    return metadata_of(demo_path)


@pytest.fixture(scope="module")
def gemma_metadata(gemma_path: Path) -> Mapping[str, Any]:
    return metadata_of(gemma_path)


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Tokenizer:
    return load_tokenizer(demo_path)


@pytest.fixture(scope="module")
def gemma(gemma_path: Path, gemma_metadata: Mapping[str, Any]) -> Tokenizer:
    return load_tokenizer(gemma_path, gemma_metadata)


@pytest.mark.slow
class TestDemo:
    @pytest.mark.parametrize("case", references("smollm2-135m-instruct.q4_1.json"), ids=lambda c: c["prompt"])
    def test_reference(self, demo, case):
        assert demo.encode(case["prompt"]) == case["prompt_ids"]
        detokenizer = Detokenizer(demo, continuation=True)
        assert "".join(map(detokenizer.add, case["greedy"])) + detokenizer.flush() == case["text"]
        assert demo.eos_token_ids.isdisjoint(case["greedy"])

    def test_llama_cpp(self, demo):
        assert wrong_ids(demo, _LLAMA_CPP["strings"], _LLAMA_CPP["smollm2"]) == []

    @pytest.mark.parametrize("pre", sorted(_LLAMA_CPP["pre"]))
    def test_llama_cpp_pre_tokenizer(self, demo_metadata, pre):
        tokenizer = tokenizer_from_gguf({**demo_metadata, "tokenizer.ggml.pre": pre})
        texts = _LLAMA_CPP["strings"]
        assert wrong_ids(tokenizer, texts, _LLAMA_CPP["pre"][pre]) == []
        if PRE_TOKENIZERS[pre].nfc:  # canonically equivalent texts have the same ids
            decomposed = [unicodedata.normalize("NFD", text) for text in texts]
            assert wrong_ids(tokenizer, decomposed, _LLAMA_CPP["pre"][pre]) == []

    def test_chat(self, demo):
        ids = demo.encode_chat([{"role": "user", "content": "Hi"}])
        text = demo.decode(ids, skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert demo.encode("<|im_end|>")[0] in demo.eos_token_ids


@pytest.mark.slow
class TestGemma:
    @pytest.mark.parametrize("case", references("gemma-3-270m.q4_k_m.json"), ids=lambda c: c["prompt"])
    def test_reference(self, gemma, case):
        assert gemma.encode(case["prompt"]) == case["prompt_ids"]
        assert gemma.encode("<bos>" + case["prompt"]) == case["prompt_ids"]
        detokenizer = Detokenizer(gemma, continuation=True)
        assert "".join(map(detokenizer.add, case["greedy"])) + detokenizer.flush() == case["text"]
        assert gemma.eos_token_ids.isdisjoint(case["greedy"])

    def test_llama_cpp(self, gemma):
        assert wrong_ids(gemma, _LLAMA_CPP["strings"], _LLAMA_CPP["gemma"]) == []

    def test_llama_cpp_with_space_prefix(self, gemma_metadata):
        tokenizer = tokenizer_from_gguf({**gemma_metadata, "tokenizer.ggml.add_space_prefix": True})
        assert wrong_ids(tokenizer, _LLAMA_CPP["strings"], _LLAMA_CPP["gemma_space_prefix"]) == []

    def test_end_of_turn_ends_and_html_does_not(self, gemma):
        ends = {gemma.token_text(i) for i in gemma.eos_token_ids}
        assert ends == {"<eos>", "<end_of_turn>"}  # </s> is a user-defined token here

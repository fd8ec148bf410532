"""Tokenizers from a Hugging Face directory: BOS, EOS, templates, decoders, errors, threads."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors

from jaxinfer.config import ConfigError
from jaxinfer.text import Detokenizer, load_tokenizer
from jaxinfer.text.gguf_tokenizer import build_backend
from jaxinfer.types import ContextLengthError, RequestError
from tests.unit.text_samples import (
    byte_level,
    byte_level_metadata,
    golden,
    sentencepiece,
    sentencepiece_metadata,
)

_MESSAGES = [{"role": "user", "content": "hello"}]
_TOKENS = byte_level_metadata()["tokenizer.ggml.tokens"]
_BOS, _EOS, _IM_END = (_TOKENS.index(text) for text in ("<s>", "</s>", "<|im_end|>"))


def save(directory: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """Writes a directory as Hugging Face has it; `files` are JSON, by their name without the ending."""
    backend.save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return directory


def with_bos() -> tokenizers.Tokenizer:
    backend = build_backend(byte_level_metadata())
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", _BOS)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


@pytest.mark.parametrize("post_processor", [False, True])
@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_tokenizer_config_overrules_the_post_processor(tmp_path, post_processor, add_bos_token):
    backend = with_bos() if post_processor else build_backend(byte_level_metadata())
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "add_bos_token": add_bos_token}
    tokenizer = load_tokenizer(save(tmp_path, backend, tokenizer_config=config))
    wanted = post_processor if add_bos_token is None else add_bos_token
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [_BOS] * wanted + bare
    assert tokenizer.encode("<s>hello") == [_BOS, *bare]
    assert tokenizer.bos_token_id == _BOS


def test_a_template_that_writes_bos_and_one_that_does_not(tmp_path):
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    directory = save(tmp_path, with_bos(), tokenizer_config=config)
    expected = load_tokenizer(directory).encode("hello")
    assert load_tokenizer(directory).encode_chat(_MESSAGES) == expected
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert load_tokenizer(directory / "tokenizer.json").encode_chat(_MESSAGES) == expected


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    directory = save(tmp_path, with_bos(), tokenizer_config={"chat_template": named})
    template = load_tokenizer(directory).chat_template
    assert template is not None
    assert template.render(_MESSAGES, tools=[{}]) == "tools"


def test_without_a_template_chat_is_refused():
    with pytest.raises(RequestError, match="no chat template") as error:
        byte_level().encode_chat(_MESSAGES)
    assert error.value.param == "messages"


def test_eos_ids_are_the_union_of_all_sources(tmp_path):
    directory = save(
        tmp_path,
        build_backend(byte_level_metadata()),
        tokenizer_config={"eos_token": "</s>"},
        config={"eos_token_id": 7, "bos_token_id": 5},
        generation_config={"eos_token_id": [8, 9]},
    )
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token_ids == {7, 8, 9, _EOS, _IM_END}
    assert tokenizer.bos_token_id == 5


@pytest.mark.parametrize(
    ("original", "metadata"),
    [(byte_level(), byte_level_metadata()), (sentencepiece(), sentencepiece_metadata())],
    ids=["byte_level", "sentencepiece"],
)
def test_tokenizer_json_and_gguf_agree(tmp_path, original, metadata):
    tokenizer = load_tokenizer(save(tmp_path, build_backend(metadata)))
    for text in golden("text/llama_cpp.json")["strings"]:
        ids = original.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == original.decode(ids)


def test_metaspace_decoder(tmp_path):
    backend = build_backend(sentencepiece_metadata())
    backend.normalizer = tokenizers.normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer = load_tokenizer(save(tmp_path, backend))
    ids = tokenizer.encode("the  sea", add_special_tokens=False)
    assert tokenizer.decode(ids) == backend.decode(ids) == "the  sea"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), "Replace + Fuse"),
    ],
)
def test_an_unknown_decoder_is_refused_by_name(tmp_path, decoder, named):
    backend = build_backend(byte_level_metadata())
    backend.decoder = decoder
    with pytest.raises(ConfigError, match=named.replace("+", r"\+")):
        load_tokenizer(save(tmp_path, backend))


def test_unreadable_files_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    save(tmp_path, with_bos(), tokenizer_config=[1])
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json holds a list"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match="surrogate") as error:
        byte_level().encode("a\ud800b")
    assert error.value.param == "prompt"


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()])
def test_a_text_that_is_bound_to_be_too_long_is_refused_unread(tokenizer: Any):
    """By a bound that no text breaks: what is refused has more tokens than the limit."""
    for limit in (1, 8):
        for num_chars in range(1, 4000, 37):
            text = ("the sea " * num_chars)[:num_chars]
            whole = tokenizer.encode(text)
            try:
                ids = tokenizer.encode(text, limit=limit)
            except ContextLengthError:
                assert len(whole) > limit
            else:
                assert ids == whole
    with pytest.raises(ContextLengthError, match="tokens at least, and the length limit is 8 "):
        tokenizer.encode("the sea " * 2000, limit=8)


def test_tokens_alone():
    tokenizer = byte_level()
    assert tokenizer.token_bytes(_TOKENS.index("Ã©")) == "é".encode()
    assert tokenizer.token_text(_TOKENS.index("ðŁ")) == "\ufffd"
    assert tokenizer.token_text(_BOS) == "<s>"
    assert tokenizer.vocab_size == len(_TOKENS)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
    assert sentencepiece().token_bytes(sentencepiece().encode("the")[-1]) == b" the"


def test_encoding_and_decoding_in_threads():
    tokenizer = sentencepiece()
    texts = [f"the sea shells, number {i}: é 🙂 " * 20 for i in range(40)]

    def there_and_back(text: str) -> str:
        detokenizer = Detokenizer(tokenizer)
        return "".join(map(detokenizer.add, tokenizer.encode(text))) + detokenizer.flush()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(there_and_back, texts)) == texts


def test_other_threads_run_while_a_text_is_encoded():
    """Else one client's long prompt would hold up everybody's tokens."""
    tokenizer, text = sentencepiece(), "the sea shells " * 60_000
    start_s = time.monotonic()
    tokenizer.encode(text)
    alone_s = time.monotonic() - start_s
    gaps_s = [0.0]
    with ThreadPoolExecutor(1) as pool:
        encoding, last_s = pool.submit(tokenizer.encode, text), time.monotonic()
        while not encoding.done():
            time.sleep(0)
            gaps_s.append(time.monotonic() - last_s)
            last_s += gaps_s[-1]
    assert len(gaps_s) > 20
    assert max(gaps_s) < alone_s / 2

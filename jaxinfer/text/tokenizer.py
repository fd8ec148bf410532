"""Text to token ids and back, from a Hugging Face directory or a GGUF file.

BOS is decided here and nowhere else: loading settles which ids go before and after a prompt, the
`tokenizers` backend is only ever asked for the bare text, and `encode` adds what is not there yet.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.config import ConfigError
from jaxinfer.text import gguf_tokenizer
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.types import ContextLengthError, RequestError
from jaxinfer_checkpoints import open_checkpoint

# Special tokens with these texts end a turn, whether the metadata say so or not (llama.cpp's list).
END_OF_TURN_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<EOT>",
    "</s>",
    "<eos>",
)
# A normalizer makes one character of at most so many (Unicode's normal form C composes up to 4).
MAX_SHRINKING = 4
# The special tokens that chat templates know by name -> their name in GGUF metadata.
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class Tokenizer:
    """Immutable after loading, so any thread may encode while another decodes.

    Attributes:
      vocab_size: one more than the highest id.
      bos_token_id: the model's BOS, whether prompts begin with it or not.
      eos_token_ids: ids that end an answer: the model's EOS and its ends of turn.
      special_token_ids: ids that are not text, which decoding skips unless told otherwise.
      chat_template: None where the checkpoint has none.
      drops_leading_space: SentencePiece's dummy prefix: the first space of a text is not part of it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
        bos_token_id: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """prefix_ids, suffix_ids: special tokens around a prompt. See the class for the others.

        Raises:
          ConfigError: the backend's decoder is of a kind that is not known.
        """
        self._backend = backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = False
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        self.bos_token_id = bos_token_id
        ends = (backend.token_to_id(text) for text in END_OF_TURN_TEXTS)
        self.eos_token_ids = eos_token_ids | {i for i in ends if i in self.special_token_ids}
        self.chat_template = chat_template
        self._byte_level, self.drops_leading_space = _decoding(backend)
        escape = "" if self._byte_level else gguf_tokenizer.SPACE
        self._added_bytes = {i: _unescape(token.content, escape).encode() for i, token in added.items()}
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
        self._most_chars_per_token = MAX_SHRINKING * longest

    def digest(self) -> str:
        """Equal for tokenizers that make the same text of the same ids, and end at the same ones."""
        parts = (self._backend.to_str(), sorted(self.eos_token_ids))
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def encode(self, text: str, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Ids of a prompt. Special tokens written in the text become their ids.

        With add_special_tokens, BOS (and for the few models that ask for it EOS) is added where the
        model wants it and the text does not have it already. `limit` is the most tokens that are of
        use: a text that is bound to have more is refused at once, since encoding it takes minutes.

        Raises:
          RequestError: the text cannot be encoded in UTF-8.
          ContextLengthError: the text is so long that it has more tokens than `limit`.
        """
        ids = self._encode_bare(text, limit)
        if not add_special_tokens:
            return ids
        ids = self._with_prefix(ids)
        return ids if ids[len(ids) - len(self._suffix_ids) :] == self._suffix_ids else ids + self._suffix_ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        limit: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation, written by the chat template; with BOS once where the model wants it.

        Raises:
          RequestError: the model has no chat template, or it cannot write these messages.
          ContextLengthError: as `encode`.
        """
        if self.chat_template is None:
            message = "messages: the model has no chat template; send a prompt to complete instead"
            raise RequestError(message, "messages")
        text = self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self._with_prefix(self._encode_bare(text, limit))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """Text of a sequence; what is not UTF-8 in it becomes U+FFFD, as in Python and Rust.

        With continuation, the ids follow a prompt: a space at their beginning is kept even where the
        tokenizer drops the first space of a text.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.drops_leading_space and not continuation else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text; b"" for an id with no token (a padded vocabulary)."""
        added = self._added_bytes.get(token_id)
        if added is not None:
            return added
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._byte_level:
            return _bytes_of_byte_level(token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return _unescape(token, gguf_tokenizer.SPACE).encode()

    def token_text(self, token_id: int) -> str:
        """One token alone as text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _encode_bare(self, text: str, limit: int | None) -> list[int]:
        fewest = len(text) // self._most_chars_per_token if limit is not None else 0
        if limit is not None and fewest > limit:
            raise ContextLengthError(
                f"prompt has {fewest} tokens at least, and the length limit is {limit} with the answer: "
                "shorten it",
                "prompt",
            )
        try:
            # Unlike `encode`, this lets other threads run meanwhile, and it is 4 to 12 times as fast, since
            # it does not track where in the text each token lies.
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:  # TypeError is what tokenizers says to both
            message = "the prompt is no string of valid Unicode: it may hold half of a surrogate pair"
            raise RequestError(message, "prompt") from error

    def _with_prefix(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._prefix_ids)] == self._prefix_ids else self._prefix_ids + ids


def load_tokenizer(path: Path, metadata: Mapping[str, Any] | None = None) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      path: a Hugging Face directory, its tokenizer.json, or a GGUF file.
      metadata: the GGUF file's key-value pairs where they were read already.

    Raises:
      ConfigError: there is no tokenizer, or one of a kind that is not known.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(_gguf_metadata(path) if metadata is None else metadata)
    file = path if path.name.endswith(".json") else path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"tokenizer: {path} has no tokenizer.json; name a tokenizer with --tokenizer")
    return _from_directory(file)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's key-value pairs (plain Python values) describe.

    Raises:
      ConfigError: as `load_tokenizer`.
    """
    backend = gguf_tokenizer.build_backend(metadata)

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    bos, eos = get("bos_token_id"), get("eos_token_id")
    add_bos = bool(get("add_bos_token", gguf_tokenizer.default_add_bos(metadata)))
    ends = [get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    named = {name: get(f"{key}_token_id") for name, key in _NAMED_TOKENS.items()}
    special = {name: backend.id_to_token(i) or "" for name, i in named.items() if i is not None}
    source = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=(eos,) if get("add_eos_token", False) and eos is not None else (),
        bos_token_id=bos,
        eos_token_ids=frozenset(i for i in ends if i is not None),
        chat_template=None if source is None else ChatTemplate(source, special),
    )


def _gguf_metadata(path: Path) -> Mapping[str, Any]:
    reader = open_checkpoint(path, verify="none")  # no tensor is read here
    try:
        return dict(reader.config)
    finally:
        reader.close()


def _from_directory(file: Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ConfigError(f"tokenizer: {file} cannot be read: {error}") from error
    config = _read_json(file.parent / "tokenizer_config.json")
    model_config = _read_json(file.parent / "config.json")
    generation = _read_json(file.parent / "generation_config.json")
    texts = {name: _token_content(config.get(name)) for name in _NAMED_TOKENS}
    special = {name: text for name, text in texts.items() if text is not None}
    ids = {name: backend.token_to_id(text) for name, text in special.items()}
    bos = ids.get("bos_token")
    prefix, suffix = _post_processor_ids(backend)
    ends = [ids.get("eos_token"), model_config.get("eos_token_id"), generation.get("eos_token_id")]
    return Tokenizer(
        backend,
        prefix_ids=_overridden(prefix, config.get("add_bos_token"), bos),
        suffix_ids=_overridden(suffix, config.get("add_eos_token"), ids.get("eos_token")),
        bos_token_id=model_config.get("bos_token_id") if bos is None else bos,
        eos_token_ids=frozenset(i for end in ends for i in _as_ids(end)),
        chat_template=_chat_template(file.parent, config, special),
    )


def _overridden(ids: tuple[int, ...], flag: bool | None, token_id: int | None) -> tuple[int, ...]:
    """The post-processor's ids, unless tokenizer_config.json says otherwise (as in transformers 5)."""
    if flag is None or (flag and token_id is None):
        return ids
    return (token_id,) if flag and token_id is not None else ()


def _post_processor_ids(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Special ids that tokenizer.json's post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    if not bare:  # a vocabulary without this letter: what there is, is BOS
        return tuple(whole), ()
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    raise ConfigError("tokenizer.json has a post-processor that changes the text's own tokens; not supported")


def _chat_template(
    directory: Path, config: Mapping[str, Any], special: Mapping[str, str]
) -> ChatTemplate | None:
    """From chat_template.jinja or else tokenizer_config.json: one template, or a list of named ones."""
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if source is None:
        return None
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    return ChatTemplate(source, special)


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenizer: {file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"tokenizer: {file} holds a {type(value).__name__}, not an object")
    return value


def _token_content(value: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or an object that holds it."""
    return value.get("content") if isinstance(value, Mapping) else value


def _as_ids(value: int | Sequence[int] | None) -> Sequence[int]:
    return () if value is None else (value,) if isinstance(value, int) else value


# --- Bytes of a token -----------------------------------------------------------------------------

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _unescape(token: str, space: str) -> str:
    return token.replace(space, " ") if space else token


def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def _bytes_of_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # a token outside the alphabet stands for its text, as in tokenizers
        return token.encode()


def _decoding(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte-level, drops the first space) for the decoders of BPE models; others are refused by name.

    What they do is done in this module, byte by byte, since the backend only decodes whole sequences.
    """
    decoder = backend.decoder
    steps = [] if decoder is None else _flat(json.loads(decoder.__getstate__()))
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return True, False
    if names == ["Metaspace"]:
        return False, steps[0].get("prepend_scheme", "always") != "never"
    allowed = {"Replace", "ByteFallback", "Fuse", "Strip"}
    if "Replace" in names and set(names) <= allowed and all(_is_sentencepiece_step(step) for step in steps):
        return False, "Strip" in names
    found = " + ".join(names) or "none"
    raise ConfigError(f"tokenizer.json has decoder {found}; known are ByteLevel, Metaspace, SentencePiece's")


def _flat(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat(inner)]


def _is_sentencepiece_step(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return step["pattern"] == {"String": gguf_tokenizer.SPACE} and step["content"] == " "
    if step["type"] == "Strip":
        return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
    return True

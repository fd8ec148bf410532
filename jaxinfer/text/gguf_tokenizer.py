"""A `tokenizers.Tokenizer` rebuilt from the metadata of a GGUF file.

Two kinds exist: "gpt2", byte-level BPE behind the pre-tokeniser that the file names, and "llama",
SentencePiece BPE with byte fallback, whose merges follow from the tokens' scores. Pre-tokenisers,
their names and defaults are those of llama.cpp's src/llama-vocab.cpp; the expressions are written as
in the models' own tokenizer.json, which llama.cpp quotes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxinfer.config import ConfigError

SPACE = "▁"  # U+2581, how SentencePiece writes a space
_KEY = "tokenizer.ggml."


class TokenType(enum.IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How byte-level BPE cuts text before it merges.

    Attributes:
      patterns: applied in order, each to the pieces that the one before left; what a pattern does not
        match is a piece too.
      ignore_merges: a piece that is a token is taken whole, whatever the merges say.
      add_bos: the default where the file has no add_bos_token.
      nfc: the model's own tokenizer.json normalises to NFC first (llama.cpp does not).
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_QWEN2 = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
)

_PRE_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_PRE_GPT2 = PreTokenizer((_GPT2,))
_PRE_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_PRE_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "command-r": _PRE_SMOLLM,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "default": _PRE_DEFAULT,
    "falcon3": _PRE_LLAMA3,
    "gpt-2": _PRE_GPT2,
    "llama-bpe": _PRE_LLAMA3,
    "llama-v3": _PRE_LLAMA3,
    "llama3": _PRE_LLAMA3,
    "megrez": PreTokenizer((_QWEN2,)),
    "olmo": _PRE_GPT2,
    "phi-2": _PRE_GPT2,
    "pixtral": _PRE_LLAMA3,
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "refact": _PRE_SMOLLM,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "smollm": _PRE_SMOLLM,
    "stablelm2": PreTokenizer((_QWEN2,)),
    "starcoder": _PRE_SMOLLM,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def build_backend(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds the tokenizer, without any post-processor: it adds no special tokens.

    Args:
      metadata: the GGUF file's key-value pairs as plain Python values.

    Raises:
      ConfigError: the kind of tokenizer or its pre-tokeniser is unknown, or its parts do not fit.
    """
    kind = _kind(metadata)
    tokens = _tokens(metadata)
    types = [int(t) for t in _array(metadata, "token_type", len(tokens), default=TokenType.NORMAL)]
    try:
        backend = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises bare ones for merges that do not fit the vocabulary
        message = f"the GGUF file's tokenizer cannot be rebuilt: {error}; convert the model again"
        raise ConfigError(message) from error
    backend.add_special_tokens(_added(tokens, types, TokenType.CONTROL, TokenType.UNKNOWN))
    backend.add_tokens(_added(tokens, types, TokenType.USER_DEFINED))
    return backend


def default_add_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a prompt begins with BOS where the file has no add_bos_token, as in llama.cpp."""
    return _kind(metadata) == "llama" or _pre_tokenizer(metadata).add_bos


def _kind(metadata: Mapping[str, Any]) -> str:
    kind = metadata.get(_KEY + "model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"tokenizer.ggml.model is {kind!r}; known are 'gpt2' (byte-level BPE), 'llama' (SPM)"
        )
    return kind


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get(_KEY + "pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ConfigError(f"tokenizer.ggml.pre is {name!r}, an unknown pre-tokeniser; known are {known}")
    return PRE_TOKENIZERS[name]


def _added(tokens: list[str], types: list[int], *kinds: TokenType) -> list[AddedToken]:
    """Tokens of these kinds, which are found in the raw text before anything else is done to it."""
    special = TokenType.CONTROL in kinds
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds
    ]


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    """The tokens by id, all different; an empty one gets a name, as in llama.cpp."""
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(metadata.get(_KEY + "tokens", ()))]
    if not tokens:
        raise ConfigError("the GGUF file has no tokenizer.ggml.tokens; name another with --tokenizer")
    if len(set(tokens)) != len(tokens):
        twice = sorted({token for i, token in enumerate(tokens) if tokens.index(token) != i})
        raise ConfigError(f"tokenizer.ggml.tokens holds {twice[0]!r} twice; convert the model again")
    return tokens


def _array(metadata: Mapping[str, Any], name: str, length: int, default: float) -> Sequence[float]:
    values = metadata.get(_KEY + name)
    if values is None:
        return [default] * length
    if len(values) != length:
        found = f"{len(values)} entries for {length} tokens"
        raise ConfigError(f"tokenizer.ggml.{name} has {found}; convert the model again")
    return values


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = _pre_tokenizer(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(_KEY + "merges", ())]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    scores = _array(metadata, "scores", len(tokens), default=0.0)
    unknown = metadata.get(_KEY + "unknown_token_id")
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges_from_scores(tokens, scores, types),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    backend = Tokenizer(model)
    prefix = bool(metadata.get(_KEY + "add_space_prefix", True))
    # Added tokens are cut out before this, so each piece of text between them gets its space.
    escape = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if prefix else escape
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(tokens: list[str], scores: Sequence[float], types: list[int]) -> list[tuple[str, str]]:
    """BPE merges in order of rank from SentencePiece's scores, as transformers' converter finds them.

    Each way to cut a normal token into two normal tokens is a merge that ranks by the whole token's
    score, the highest first; among equals the lower id, then the longer left part.
    """
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    by_rank = sorted(range(len(tokens)), key=lambda i: -scores[i])  # a stable sort: equals keep their order
    merges: list[tuple[str, str]] = []
    for i in by_rank:
        token = tokens[i]
        if types[i] != TokenType.NORMAL:
            continue
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in normal:
                right = token[cut:]
                if right in normal:
                    merges.append((left, right))
    return merges

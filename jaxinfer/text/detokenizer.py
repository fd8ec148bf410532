"""Token ids to text, one token at a time."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one sequence incrementally: the pieces joined are the tokenizer's `decode` of all ids.

    Each token costs its own bytes and no more: a token is a string of bytes, and an incremental
    UTF-8 decoder keeps at most three bytes of an unfinished character. A sequence needs its own
    instance; instances share nothing that changes, so threads may run theirs side by side.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continuation: bool = False
    ) -> None:
        """continuation: as in `Tokenizer.decode`: the ids follow a prompt, so a space at their
        beginning belongs to the text even where the tokenizer drops one at a text's beginning.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._drop_space = tokenizer.drops_leading_space and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Takes the next token; returns its text, "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        return self._at_start(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """Returns what an unfinished character at the end becomes: U+FFFD, or ""."""
        return self._at_start(self._utf8.decode(b"", final=True))

    def _at_start(self, text: str) -> str:
        """`text`, without the one space that the tokenizer puts before a text."""
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

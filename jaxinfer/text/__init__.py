"""Text in and out: tokenizer, chat template, incremental detokeniser, stop strings. No jax."""

from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.stops import StopStrings
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer", "load_tokenizer"]

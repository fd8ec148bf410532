"""LLM inference in JAX. `LLM` runs prompts in this process; `jaxinfer.serve` is the HTTP server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxinfer.types import CompletionOutput, RequestError, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestError", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports `LLM`, and jax with it, when it is first used: the host's modules need neither."""
    if name == "LLM":
        from jaxinfer.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Kernels for CPUs in C++, which a compiler on the machine compiles for its processor, called through XLA's FFI."""

from jaxinfer_kernels.cpu.build import CompilerError, load

__all__ = ["CompilerError", "load"]

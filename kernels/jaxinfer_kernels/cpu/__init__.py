"""Kernels for CPUs in C++, compiled on the machine for its processor and called through XLA's FFI."""

from jaxinfer_kernels.cpu.build import CompilerError, load

__all__ = ["CompilerError", "load"]

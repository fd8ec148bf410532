"""The C++ kernels of a CPU: compiled at the first start, where there is a compiler."""

from __future__ import annotations

from pathlib import Path

from absl import logging

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.engine.resolve import Device
from jaxinfer_checkpoints.hub import DEFAULT_CACHE_DIR
from jaxinfer_kernels.cpu import CompilerError, load


def load_cpu_kernels(config: EngineConfig, device: Device) -> bool:
    """Whether they are there for this device to run.

    Raises:
      ConfigError: they were asked for by name, and there is no compiler.
    """
    asked = {"attention": config.attention, "matmul": config.matmul}
    if device.platform != "cpu" or not {"auto", "cpu"} & set(asked.values()):
        return False
    try:
        load(Path(config.cache_dir or DEFAULT_CACHE_DIR).expanduser() / "kernels")
    except CompilerError as error:
        for name, value in asked.items():
            if value == "cpu":
                raise ConfigError(f"{name}=cpu: {error}; install one, or use {name}=xla") from error
        logging.warning("attention and matmul are xla, the slower ones: %s", error)
        return False
    return True

"""What accelerators are, by their makers' published figures: memory, bandwidths and rates.

Sources, as of November 2026; `source` of each chip names the page or paper.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from jaxinfer.config import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One chip; None is a figure that its maker does not publish.

    Attributes:
      name: as `--chip` takes it.
      platform: jax's name of its kind.
      memory_gib: of HBM. The data sheets' "GB" are GiB, as drivers report but for some hundred MB.
      bandwidth_gbps: of HBM, GB a second.
      interconnect_gbps: between chips, GB a second in and out together over all links.
      bf16_tflops, int8_tops, fp8_tflops: dense, 10^12 operations a second; a multiplication and an
        addition are two.
      source: where the figures are from.
      num_devices: that jax shows of a chip. Each has an equal part of everything above.
      topology_dims: dimensions of its torus, for the names of topologies; 0 is no torus.
      compute_capability: a GPU's, as jax's devices tell it.
    """

    name: str
    platform: Literal["tpu", "gpu", "cpu"]
    memory_gib: float
    bandwidth_gbps: float | None
    interconnect_gbps: float | None
    bf16_tflops: float | None
    int8_tops: float | None
    fp8_tflops: float | None
    source: str
    num_devices: int = 1
    topology_dims: int = 0
    compute_capability: str | None = None

    def memory_stats(self) -> dict[str, Any]:
        """As one of its devices would report."""
        return {"bytes_limit": int(self.memory_gib * GIB) // self.num_devices}


_CLOUD = "https://cloud.google.com/tpu/docs/"
_HOPPER = "https://www.nvidia.com/en-us/data-center/"

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip(
                *("v4", "tpu", 32, 1200, 600, 275, 275, None),
                source=f"{_CLOUD}v4; Jouppi et al. 2023, arXiv 2304.01433",
                topology_dims=3,
            ),
            Chip(*("v5e", "tpu", 16, 819, 400, 197, 393, None), source=f"{_CLOUD}v5e", topology_dims=2),
            Chip(
                *("v5p", "tpu", 95, 2765, 1200, 459, 918, 459),
                source=f"{_CLOUD}v5p, {_CLOUD}tpu7x (a table of v5p, v6e and TPU7x)",
                topology_dims=3,
            ),
            Chip(
                *("v6e", "tpu", 32, 1638, 800, 918, 1836, 918),
                source=f"{_CLOUD}v6e, {_CLOUD}tpu7x",
                topology_dims=2,
            ),
            Chip(
                *("tpu7x", "tpu", 192, 7380, 1200, 2307, None, 4614),
                source=f"{_CLOUD}tpu7x",
                num_devices=2,
                topology_dims=3,
            ),
            Chip(
                *("h100", "gpu", 80, 3350, 900, 989.4, 1978.9, 1978.9),
                source=f"{_HOPPER}h100/ (SXM)",
                compute_capability="9.0",
            ),
            Chip(
                *("h200", "gpu", 141, 4800, 900, 989.4, 1978.9, 1978.9),
                source=f"{_HOPPER}h200/ (SXM)",
                compute_capability="9.0",
            ),
            Chip(
                *("b200", "gpu", 180, 8000, 1800, 2250, 4500, 4500),
                source="NVIDIA Blackwell Architecture Technical Brief (HGX B200)",
                compute_capability="10.0",
            ),
        )
    }
)


def find_chip(name: str) -> Chip:
    """By its name; "cpu" is the machine that this runs on.

    Raises:
      ConfigError: there is none of that name.
    """
    if name == "cpu":
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Chip("cpu", "cpu", memory_bytes / GIB, None, None, None, None, None, source="this machine")
    if name not in CHIPS:
        raise ConfigError(f"chip={name!r} must be one of cpu, {', '.join(CHIPS)}")
    return CHIPS[name]

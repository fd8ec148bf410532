"""Block sizes that were measured, or ranked by a compiler's estimates, by chip.

data/CHIP.json holds {"op": {"key": {"block": size, ...}}}; `scripts/tune_kernels.py` writes it. Kernels
have safe defaults for what is not there. No entry may change a result: sizes that decide how sums are
associated are no block sizes to tune.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

import jax

# Other names that jax knows of the same chips.
_SAME_CHIPS = {"tpu_v5e": "tpu_v5_lite", "tpu_v5p": "tpu_v5", "tpu_v6e": "tpu_v6_lite"}


def chip_name(device_kind: str) -> str:
    """ "TPU v5 lite" and "TPU v5e" -> "tpu_v5_lite": the name of the chip's file."""
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")
    return _SAME_CHIPS.get(name, name)


def current_chip() -> str:
    """The chip that is compiled for: of the mesh that is set, or of the first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return chip_name(device.device_kind)


def tuned(op: str, key: str) -> Mapping[str, int]:
    """The tuned sizes of an op for a shape, by name; none if nobody tuned them for this chip."""
    return _table(current_chip()).get(op, {}).get(key, {})


@cache
def _table(chip: str) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    path = resources.files("jaxinfer_kernels") / "data" / f"{chip}.json"
    return json.loads(path.read_text()) if path.is_file() else {}

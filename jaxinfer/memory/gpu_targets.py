"""GPUs as XLA's compiler wants them described (GpuTargetConfigProto), where none is there.

The figures are XLA's own, in xla/backends/gpu/target_config/specs. Accelerated features make the targets
sm_90a and sm_100a.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _target(
    name: str, major: int, cores: int, clock_ghz: float, bandwidth: int, memory_bytes: int, l2_bytes: int
) -> str:
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: {cores} fpus_per_core: 128 clock_rate_ghz: {clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_bytes} device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {major} minor: 0 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
device_description_str: "{name}"
"""


# By the chip's name in chips.py.
GPU_TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "h100": _target("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 3352320000000, 84942979072, 52428800),
        "h200": _target("NVIDIA H200 141GB HBM3e", 9, 132, 1.98, 4800000000000, 151397597184, 52428800),
        "b200": _target("NVIDIA B200", 10, 148, 1.965, 7672320000000, 191514411008, 132644864),
    }
)

"""Paged attention for NVIDIA GPUs, in Pallas's Mosaic GPU dialect.

Which GPUs is said here, since importing Pallas takes 0.3 s.
"""

HOPPER_CAPABILITIES = ("9.0",)
BLACKWELL_CAPABILITIES = ("10.0",)  # the B200's; not the consumers' 12.0
GPU_CAPABILITIES = (*HOPPER_CAPABILITIES, *BLACKWELL_CAPABILITIES)

"""Number formats: which one a device is fast in.

Chains, energies, losses, weights and optimizer stay in float32; what 16 bits are used for is the network's inside.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware: AVX-512 bf16 or AMX on a CPU, any GPU that says so.

    Apple's MPS counts as without: nothing was measured there.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


def choose(precision: str, device: torch.device, network: str) -> torch.dtype:
    """The dtype of "auto", "float32" or "bfloat16" for a network, by its name in the config, on a device.

    "auto" takes bfloat16 where it is in hardware, except for an mlp: its products are too small to gain by it.
    """
    if precision == "auto":
        return torch.bfloat16 if network != "mlp" and has_bfloat16(device) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def prepare(precision: str, device: torch.device) -> None:
    """On CUDA: TF32 for what is left in float32, unless float32 was asked for by name; convolutions that repeat.

    cuDNN's default may choose kernels that add in no fixed order; without them equal runs agree bit for bit. Matrix
    products do so already: torch gives every stream a cuBLAS workspace of its own. Settings of the process.
    """
    if device.type == "cuda":
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager:
    """Inside, matrix products and convolutions run in `dtype`; for float32 nothing is changed."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)

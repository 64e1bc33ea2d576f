"""The class of workers that compute the same bits: everything outside the program that was found to change them."""

import os
from collections.abc import Sequence

import torch


def numerics_class(device: torch.device, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """One line; two workers whose lines are equal compute the same bits from the same state."""
    parts = [f"device={device.type}", f"torch={torch.__version__}", f"threads={torch.get_num_threads()}"]
    if device.type == "cuda":
        parts.append(f"name={torch.cuda.get_device_name(device)}")
        parts.append(f"tf32={torch.backends.cuda.matmul.allow_tf32}")
        parts.append(f"cublas={os.environ.get('CUBLAS_WORKSPACE_CONFIG', 'default')}")
    else:
        parts.append(f"cpu={torch.backends.cpu.get_cpu_capability()}")
        parts.append(f"cbwr={os.environ.get('MKL_CBWR', 'default')}")
        parts.append(f"mkldnn={torch.backends.mkldnn.enabled}")
    parts.append(f"matmul={torch.get_float32_matmul_precision()}")
    for optimizer in optimizers:
        flags = [name for name in ("fused", "foreach", "capturable") if optimizer.defaults.get(name)]
        parts.append(f"optimizer={type(optimizer).__name__}" + "".join(f"+{flag}" for flag in flags))
    return " ".join(parts)

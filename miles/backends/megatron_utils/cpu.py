"""What Megatron-Core needs to run on a CPU; a run on GPUs never imports this file.

Megatron-Core names "cuda" wherever it makes a tensor of its own. Nothing inside it is changed: a function mode sends
those tensors to the CPU, and the few calls that would start the CUDA runtime answer as on a device that is idle.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _CpuForCuda(TorchFunctionMode):
    """Sends `device="cuda"` to the CPU and lets a tensor claim the CUDA type that Megatron's optimizer asserts."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run Megatron-Core on the CPU while the context is open, in this process only."""
    with (
        warnings.catch_warnings(),
        mock.patch("torch.cuda.current_device", lambda: "cpu"),
        mock.patch("torch.cuda.synchronize", lambda *args: None),
        _CpuForCuda(),
    ):
        warnings.filterwarnings("ignore", module="megatron")
        yield

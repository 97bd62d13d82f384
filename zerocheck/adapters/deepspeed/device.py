"""Accelerator of DeepSpeed for a device without data, next to which shards are in host memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class DeviceWithoutData(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's accelerator of CPUs, with tensors on another device, of this type.

    Like the CPU's it has neither streams nor events.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def device_name(self, device_index: int | None = None) -> str:
        return self._device

    def current_device_name(self) -> str:
        return self._device

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    @property
    def ByteTensor(self) -> Any:
        return partial(self._empty, torch.uint8)

    @property
    def FloatTensor(self) -> Any:
        return partial(self._empty, torch.float32)

    def _empty(self, dtype: torch.dtype, values: list[float]) -> torch.Tensor:
        return torch.empty(len(values), dtype=dtype, device=self._device)

"""Reads the utilisation of this machine's NVIDIA GPUs with the driver's library (NVML), if there is one."""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]  # % of the time


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpus:
    """Reads every GPU of the machine; a driver that does not answer counts as missing."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._devices: list[ctypes.c_void_p] = []
        try:
            self._nvml = ctypes.CDLL(library)
            if self._nvml.nvmlInit_v2() == 0:
                self._devices = self._find()
        except (OSError, AttributeError):  # no such library, or one of another kind
            self._devices = []

    def _find(self) -> list[ctypes.c_void_p]:
        count, found = ctypes.c_uint(), []
        self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for number in range(count.value):
            device = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(device)) == 0:
                found.append(device)
        return found

    def read(self) -> list[dict[str, Any]]:
        """For each GPU, the fraction of recent time it was busy and its memory in use; None if unknown."""
        rows = []
        for device in self._devices:
            use, memory = _Utilization(), _Memory()
            knows_use = self._nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)) == 0
            knows_memory = self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
            rows.append({"busy": use.gpu / 100 if knows_use else None,
                         "memory_bytes": memory.used if knows_memory else None})  # fmt: skip
        return rows

    def close(self) -> None:
        if self._devices:
            self._nvml.nvmlShutdown()
            self._devices = []

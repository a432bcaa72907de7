"""Asking a GPU's driver: what is said to its library, and that without one nothing is said.

No machine of ours has a GPU. The library is one that the test compiles, with the functions and structures of NVIDIA's
nvml.h: what is tested is that we call them as that says.
"""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

from paceline.launch.gpus import Gpus

DRIVER = """
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
static int devices[2] = {0, 1};
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, nvmlUtilization_t *use) {
  if (*(int *)device) return 3;  /* not supported */
  use->gpu = 87; use->memory = 12; return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, nvmlMemory_t *memory) {
  memory->total = 8ULL << 30; memory->used = 5ULL << 30; memory->free = 3ULL << 30; return 0;
}
"""


def test_every_gpu_is_read_and_what_it_does_not_tell_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    with closing(Gpus(str(library))) as gpus:
        assert gpus.read() == [{"busy": 0.87, "memory_bytes": 5 << 30}, {"busy": None, "memory_bytes": 5 << 30}]


def test_without_a_driver_or_with_another_library_nothing_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int other;\n")
    library = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "empty.c"], check=True)
    for name in ("libnvidia-ml.so.none", str(library)):
        with closing(Gpus(name)) as gpus:
            assert gpus.read() == []

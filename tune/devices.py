"""Peak and achieved rates of devices: a table, or a file written by a calibration."""

import json
import os
import re
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tune.errors import TuneError, explained
from tune.lookup import did_you_mean

CACHED = 0.4  # time of a read from the cache, as a share of the time from memory


@dataclass(frozen=True)
class Device:
    """A device with its memory in GiB and its speeds.

    Peaks are from the vendor's data sheet:

    - `tflops` of dense bf16 products and, unless `tflops_fp16` differs, of fp16; `float8` of 8-bit products (0: none);
      `tflops_fp32` as torch computes them (on NVIDIA with TF32 off)
    - `bandwidth` of its memory and, in one direction, of `link` (within a node), `network` (between nodes) and `host`,
      in GB/s

    Kernels reach `product_share`, `attention_share` (of FlashAttention-2, which torch has), `bandwidth_share` and
    `link_share` of the peaks. `launch` and `latency` are the microseconds until an operation or a collective begins.
    `reserve` GiB (context, libraries) and `reserve_share` of allocated memory (fragments) are not available for
    tensors. `host_memory` is each device's part of its node's memory in GiB. `capability` is the compute capability of
    a GPU. `cores` are those of a CPU, and `crowd` the processes per core, 1 or more. Operations that read and write
    less than `cache` MiB use the cache.
    """

    name: str
    memory: float
    tflops: float
    tflops_fp32: float
    bandwidth: float
    link: float
    network: float
    host: float = 25
    per_node: int = 8
    product_share: float = 0.7
    bandwidth_share: float = 0.75
    link_share: float = 0.7
    launch: float = 4.0
    reserve: float = 1.0
    reserve_share: float = 0.05
    flash: bool = True
    host_memory: float = 200
    attention_share: float = 0.35
    latency: float = 20.0
    cache: float = 0.0
    cores: int = 1
    crowd: float = 1.0
    float8: float = 0.0
    capability: tuple[int, int] | None = None
    tflops_fp16: float | None = None

    @property
    def is_host(self) -> bool:
        """Whether the device is the CPU, whose memory is the host's."""
        return self.name == "cpu"

    @property
    def attends_as(self) -> tuple[int, int] | None:
        """The compute capability by which attention chooses its kernels; None: kernels for other devices."""
        return max(self.capability or (8, 0), (8, 0)) if self.flash else self.capability

    def shared_by(self, processes: int) -> "Device":
        """The device as seen by one of `processes` processes; CPU processes share it, but `memory` is per process."""
        share = min(processes, self.per_node) if self.is_host else 1
        rates = {name: getattr(self, name) / share for name in ("tflops", "tflops_fp32", "bandwidth")}
        return replace(self, **rates, crowd=max(1.0, share / self.cores))

    def at_speed(self, speed: float) -> "Device":
        """The device if it were `speed` times as fast."""
        shares = ("product_share", "attention_share", "bandwidth_share")
        return replace(self, **{name: getattr(self, name) * speed for name in shares}, launch=self.launch / speed)

    @property
    def fastest(self) -> float:
        """The highest peak of bf16, fp16 and fp32."""
        return max(self.tflops, self.tflops_fp32, self.tflops_fp16 or 0.0)

    def peak(self, dtype: str) -> float:
        """The peak of matrix products in bf16, fp16, fp32 or fp8."""
        peaks = {"fp32": self.tflops_fp32, "fp8": self.float8, "fp16": self.tflops_fp16 or self.tflops}
        return peaks.get(dtype, self.tflops)

    def seconds(self, flops: float, moved: float, dtype: str, attends: bool = False) -> float:
        """The seconds of an operation with `flops` and `moved` bytes: the longer of computing and moving."""
        peak = self.peak(dtype)
        share = self.attention_share if attends else self.product_share
        by_memory = moved / (self.bandwidth * 1e9 * self.bandwidth_share)
        by_memory *= CACHED if moved < self.cache * 2**20 else 1
        busy, launch = max(flops / (peak * 1e12 * share), by_memory), self.launch * 1e-6
        return busy + launch if self.is_host else max(busy, launch)  # a GPU computes during the next launch

    def transfer(self, moved: float, processes: int, span: int = 0) -> float:
        """The seconds of a collective of `processes` neighbors, in which each sends and receives `moved` bytes.

        With `span`, the processes are spread over this many neighbors.
        """
        speed = self.link if (span or processes) <= self.per_node else self.network
        if processes == 1:
            return 0.0
        latency = self.latency * self.crowd * 1e-6
        return moved * (processes - 1) / processes * self.crowd / (speed * 1e9 * self.link_share) + latency


DEVICES = {
    "t4": Device(
        "t4", 15, 8.1, 8.1, 320, 16, 6, 16, 4, flash=False, capability=(7, 5), tflops_fp16=65
    ),  # emulates bf16
    "l4": Device("l4", 24, 121, 30.3, 300, 25, 12, 25, float8=242, capability=(8, 9)),
    "a10g": Device("a10g", 24, 70, 31.5, 600, 25, 12, 25, attention_share=0.6, capability=(8, 6)),
    "l40s": Device("l40s", 48, 362, 91.6, 864, 25, 12, 25, float8=733, capability=(8, 9)),
    "rtx3060": Device("rtx3060", 12, 25, 12.7, 360, 25, 12, 25, attention_share=0.6, capability=(8, 6)),
    "rtx3090": Device("rtx3090", 24, 71, 35.6, 936, 25, 12, 25, attention_share=0.6, capability=(8, 6)),
    "rtx4080": Device("rtx4080", 16, 97, 48.7, 717, 25, 12, 25, attention_share=0.6, float8=195, capability=(8, 9)),
    "rtx4090": Device("rtx4090", 24, 165, 82.6, 1008, 25, 12, 25, attention_share=0.6, float8=330, capability=(8, 9)),
    "rtx5090": Device("rtx5090", 32, 209, 104.8, 1792, 50, 12, 50, float8=419, capability=(12, 0)),
    "a100": Device("a100", 80, 312, 19.5, 2039, 300, 25, attention_share=0.6, capability=(8, 0)),
    "h100": Device("h100", 80, 989, 67, 3350, 450, 50, 50, float8=1979, capability=(9, 0)),
    "h200": Device("h200", 141, 989, 67, 4800, 450, 50, 50, float8=1979, capability=(9, 0)),
    "b200": Device("b200", 180, 2250, 75, 8000, 900, 50, 50, float8=4500, capability=(10, 0)),
    "mi300x": Device("mi300x", 192, 1307, 163, 5300, 448, 50, float8=2615, capability=(9, 4)),
    "cpu": Device(  # two cores of a server, and gloo
        "cpu", 16, 0.05, 0.1, 20, 1, 1, 20, 64, 0.7, 0.7, 0.7, 12, 0.4, 0.05, False, 200, 0.7, 1300, 8, cores=2
    ),
}


def named(full_name: str) -> Device | None:
    """The device with a GPU's full name from its driver, such as NVIDIA H100 80GB HBM3 or NVIDIA GeForce RTX 4090.

    None if it is not known.
    """
    for name, device in DEVICES.items():
        pattern = name.upper().replace("RTX", "RTX ")
        if re.search(rf"\b{pattern}\b(?! LAPTOP| TI)", full_name.upper()):
            return device
    return None


def device(name: str) -> Device:
    """The device with a name in `DEVICES`, or in a file. Raises TuneError for anything else."""
    if name in DEVICES:
        return DEVICES[name]
    file = Path(name)
    if not file.is_file():
        raise TuneError(
            f"--device: {name} is neither a known device nor a file.{did_you_mean(name, DEVICES)} Known devices: "
            f"{', '.join(DEVICES)}; `tune plan --calibrate RUN` writes a file"
        )
    known = ", ".join(each.name for each in fields(Device))
    with explained(f"--device: {name} must be a JSON object with {known}", ValueError, TypeError):
        found = dict(json.loads(file.read_text(encoding="utf-8")))
        return Device(**found | {"capability": found.get("capability") and tuple(found["capability"])})


def triton_lacks(environ: Mapping[str, str] = os.environ) -> str:
    """The tool that Triton needs to build its launchers and that is missing here; "" if none is."""
    compilers = [environ["CC"]] if environ.get("CC") else ["gcc", "clang"]
    if not any(shutil.which(name, path=environ.get("PATH")) for name in compilers):
        return f"a C compiler ({' or '.join(compilers)}), but found none"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"Python's headers, but {header} does not exist"

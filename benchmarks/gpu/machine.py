"""Print the machine's description for the page of results as JSON: device, versions, host."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("transformers", "trl", "liger-kernel", "peft", "torchao", "bitsandbytes", "flash-linear-attention")


def main(device: str) -> None:
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "triton": version("triton")}
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    versions |= {name: version(name) for name in PACKAGES}
    found = {
        "device": "CPU", "memory": 0.0, "devices": os.cpu_count() or 1,
        "host": f"{processor()}, {os.cpu_count()} cores",
        "versions": {name: number for name, number in versions.items() if number},
    }  # fmt: skip
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        major, minor = torch.cuda.get_device_capability(0)
        found["device"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {major}.{minor}, {driver()}"
        found |= {"memory": card.total_memory / 2**30, "devices": torch.cuda.device_count()}
    print(json.dumps(found))


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "driver unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return f"driver {lines[0]}" if lines else "driver unknown"


if __name__ == "__main__":
    main(sys.argv[1])

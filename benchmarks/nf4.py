"""Measure dequantization of NF4: seconds, and bytes read and written per weight, in tune and in torchao.

    python benchmarks/nf4.py [--rows 4096 --columns 4096 --threads 1 --compile]

`--compile` also measures tune's single compiled kernel, which a GPU would use (here compiled for this CPU).
"""

import argparse
import functools
import statistics
import time

import torch
from bytes_moved import BytesMoved
from torchao.quantization import to_nf4

from tune.quantization import dequantize, nf4, quantize


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 4096, "columns": 4096, "threads": 1, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    weight = torch.randn(args.rows, args.columns) * 0.02
    print(f"torch {torch.__version__}, {args}")
    for dtype in (torch.bfloat16, torch.float32):
        single, double, theirs = quantize(weight), quantize(weight, double=True), to_nf4(weight.to(dtype))
        variants = {
            "tune": functools.partial(dequantize, *single, dtype),
            "tune, double": functools.partial(dequantize, *double, dtype),
            "torchao (double)": theirs.get_original_weight,
        }
        if args.compile:
            kernel = torch.compile(nf4._values, dynamic=True)
            variants["tune, compiled"] = functools.partial(kernel, *single, nf4.PAIRS, dtype)
        seconds = {name: [] for name in variants}
        for variant in variants.values():
            variant()
        for _ in range(args.rounds):
            for name, variant in variants.items():
                start = time.perf_counter()
                variant()
                seconds[name].append(time.perf_counter() - start)
        for name, variant in variants.items():
            with BytesMoved() as moved:
                variant()
            each = moved.total / weight.numel()
            if name == "tune, compiled":  # one kernel: only inputs and output
                each = (sum(part.nbytes for part in single[:2]) + weight.numel() * dtype.itemsize) / weight.numel()
            took = sorted(seconds[name])
            print(
                f"{dtype!s:15} {name:18} {statistics.median(took) * 1e3:8.1f} ms (fastest {took[0] * 1e3:.1f})   "
                f"{each:5.2f} bytes a weight"
            )


if __name__ == "__main__":
    main()

"""Measure time, memory and filled share of packing a million documents, with tune and with TRL's packer.

    python benchmarks/packing.py [--documents 1000000 --capacity 2048]

Lengths are log-normal like those of chats (median 245, one in a hundred over 2,048), cut at the capacity. `tune`
returns indices and does not move tokens; TRL writes a new table of packed tokens. `trl` uses its defaults (batches of
1,000 documents), `trl_whole` packs the whole set like `tune`. Each variant runs in a separate process.
"""

import argparse
import resource
import subprocess
import sys
import time

import numpy as np


def tune(lengths, capacity):
    from tune.datasets import pack

    def run():
        _, starts = pack(lengths, capacity)
        return len(starts) - 1

    return run


def trl(lengths, capacity, **map_kwargs):
    import datasets
    import pyarrow
    from trl import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = pyarrow.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], dtype=np.int32))
    table = datasets.Dataset(pyarrow.table({"input_ids": tokens}))
    return lambda: len(pack_dataset(table, capacity, strategy="bfd", map_kwargs=map_kwargs))


VARIANTS = {
    "tune": tune,
    "trl": trl,
    "trl_whole": lambda lengths, capacity: trl(lengths, capacity, batch_size=len(lengths)),
}


def measure(variant, args):
    """Return seconds, peak GiB of the process, and the filled share."""
    lengths = np.random.default_rng(0).lognormal(5.5, 0.92, args.documents)
    lengths = np.clip(lengths, 8, args.capacity).astype(np.int64)
    run = VARIANTS[variant](lengths, args.capacity)
    start = time.perf_counter()
    rows = run()
    return time.perf_counter() - start, peak(), lengths.sum() / (rows * args.capacity)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one, in this process")
    args = parser.parse_args()
    if args.variant:
        print(*measure(args.variant, args))
        return
    for variant in VARIANTS:
        run = subprocess.run([sys.executable, *sys.argv, "--variant", variant], stdout=subprocess.PIPE, text=True)
        if run.returncode:
            print(f"{variant:10} failed")
            continue
        seconds, most, filled = map(float, run.stdout.split())
        print(f"{variant:10} {seconds:7.2f} s   peak {most:5.2f} GiB   {filled:.2%} filled", flush=True)


if __name__ == "__main__":
    main()

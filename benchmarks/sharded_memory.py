"""Measure the memory that loading and exporting need in each process, beyond the shards that it holds.

    torchrun --nproc-per-node 4 benchmarks/sharded_memory.py [--folder FOLDER] [tp=2 ...]

The model is a Llama of 2.0 GB in fp32 with random weights, with `ep` a Mixtral of 1.8 GB with 4 experts per block; the
largest tensors are embedding and head (403 MB each). Its folder is created first and removed afterwards. Memory is the
process's own (Linux's RssAnon, read every 2 ms), without pages of files, which the system can reclaim. Prints in MB,
for the process with the most: the peak of each part above the memory before, and the memory that it holds.
"""

import argparse
import json
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from tune import checkpointers, distributed
from tune.models import build

CONFIG = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 2816, "num_hidden_layers": 3}
MB = 1e6


def anonymous():
    """Return the anonymous memory of this process, in bytes."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


@contextmanager
def peak(found, name):
    begin, is_over = anonymous(), threading.Event()
    found[name] = 0.0

    def watch():
        while not is_over.is_set():
            found[name] = max(found[name], (anonymous() - begin) / MB)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    is_over.set()
    watcher.join()


def write_model(folder, config):
    """Write the model by blocks, with Hugging Face names, so that no process holds all of it."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = build(str(folder))
    files: dict[str, dict[str, torch.Size]] = {}
    for name, on_disk in model.names.on_disk.items():
        part = name.split(".")[1] if name.startswith("blocks.") else name
        shape = model.get_parameter(name).shape
        one_each = {on_disk: shape} if isinstance(on_disk, str) else dict.fromkeys(on_disk, shape[1:])
        files.setdefault(part, {}).update(one_each)
    index = {}
    for number, shapes in enumerate(files.values()):
        file = f"model-{number:05d}.safetensors"
        save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / file)
        index |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", metavar="axis=size")
    parser.add_argument("--folder", type=Path, help="folder for temporary files of 4 GB")
    options = parser.parse_args()
    axes = {axis: int(size) for axis, _, size in (each.partition("=") for each in options.axes)}
    world = distributed.init("cpu", **axes)
    made = Path(tempfile.mkdtemp(dir=options.folder)) if world.is_main else None
    folder = world.broadcast(made)
    try:
        if world.is_main:
            (folder / "model").mkdir()
            write_model(folder / "model", CONFIG | (EXPERTS if "ep" in axes else {}))
        world.barrier()
        source, found = str(folder / "model"), {}
        with torch.device("meta"):
            model = build(source)
        weights = checkpointers.Pretrained(source, model)
        distributed.parallelize(model, world, dtype="fp32")
        held = sum(distributed.local_shard(parameter)[0].nbytes for parameter in model.parameters()) / MB
        with peak(found, "loading"):
            weights.load(model)
        found["loading"] -= held  # allocated, but not touched before
        with peak(found, "exporting"):
            checkpointers.export(model, None, folder / "exported", world, source=source)
        found["largest"] = max(parameter.numel() for parameter in model.parameters()) * 4 / MB
        found["held"] = held
        most = {name: max(each[name] for each in world.from_all_ranks(found)) for name in found}
        if world.is_main:
            print(f"{world.size} processes, {' '.join(options.axes)}:", end=" ")
            print(", ".join(f"{name} {size:,.0f}" for name, size in most.items()))
        world.barrier()
    finally:
        if world.is_main:
            shutil.rmtree(folder)
    world.finish()


if __name__ == "__main__":
    main()

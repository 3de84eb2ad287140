"""Simulate models with hundreds of billions of parameters on hundreds of processes, with fake tensors.

    python benchmarks/large_layouts.py                                            # the table of docs/benchmarks.md
    python benchmarks/large_layouts.py --model llama-405b tp=8 pp=16 --rank 256  # of one layout
    python benchmarks/large_layouts.py --model FOLDER --processes 64 ep=8        # of a config.json

Builds and shards the model and runs forward and backward of one micro-batch like one of the processes, with torch's
`fake` process group and tensors without values: all the code of a step runs, but nothing is computed. With experts,
every process receives the same number of tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune import distributed
from tune.collators import Batch
from tune.distributed import local_shard
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.models import build

MODELS = {
    "llama-405b": {
        "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840, "rope_theta": 10000, "tie_word_embeddings": False,
        "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    },
}  # fmt: skip
LAYOUTS = [
    "--model llama-405b tp=8",
    "--model llama-405b tp=8 cp=4 dp_replicate=2",
    "--model llama-405b tp=8 pp=8",
    "--model llama-405b tp=8 pp=8 --rank 511",
    "--model deepseek-v3 ep=64",
    "--model deepseek-v3 ep=32 cp=4 dp_replicate=2",
    "--model deepseek-v3 ep=32 pp=8 --rank 256",
    "--model deepseek-v3 tp=8",
]  # the remaining processes are FSDP's


AXES = "dp_replicate", "dp_shard", "cp", "tp", "ep", "pp"


def step(folder, processes, rank, axes, tokens):
    """Run a step of the process `rank`. Returns its bytes of the model, and the time and memory of the simulation."""
    begin = time.perf_counter()
    dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())
    world = distributed.init("cpu", max_seq_len=tokens, **axes)
    with torch.device("meta"):
        model = build(folder)
    whole = sum(each.nbytes for each in model.parameters())
    fake, allocate = FakeTensorMode(allow_non_fake_inputs=True), model.to_empty

    def without_memory(*, device):
        with fake:
            return allocate(device=device)

    model.to_empty = without_memory
    distributed.parallelize(model, world)
    pipeline = distributed.Pipeline(model, world)
    built = time.perf_counter() - begin
    numbers = np.arange(tokens)[None] % model.config.vocab_size
    batch = Batch.of(numbers, numbers)
    with fake:
        for each in pipeline.turns([batch]):
            loss = model(each, LinearCrossEntropy())
            for due, _ in pipeline.due(loss):
                due.backward()
    world.finish()
    return {
        "whole": whole,
        "parameters": sum(local_shard(each)[0].nbytes for each in model.parameters()),
        "gradients": sum(local_shard(each.grad)[0].nbytes for each in model.parameters()),
        "built": built,
        "seconds": time.perf_counter() - begin,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def axis(text):
    name, _, size = text.partition("=")
    if name not in AXES or not size.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is no size of {', '.join(AXES)}")
    return name, int(size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", type=axis, metavar="AXIS=SIZE", help=f"axes: {', '.join(AXES)}")
    parser.add_argument("--model", help=f"{', '.join(MODELS)} or a folder with config.json")
    parser.add_argument("--processes", type=int, default=512)
    parser.add_argument("--rank", type=int, default=0, help="the simulated process: stages of pp differ")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per micro-batch")
    args = parser.parse_args()
    if not 0 <= args.rank < args.processes:
        parser.error(f"--rank: of {args.processes} processes it is 0 to {args.processes - 1}")
    if args.model:
        with tempfile.TemporaryDirectory() as folder:
            if args.model in MODELS:
                Path(folder, "config.json").write_text(json.dumps(MODELS[args.model]), encoding="utf-8")
            path = folder if args.model in MODELS else args.model
            try:
                return print(json.dumps(step(path, args.processes, args.rank, dict(args.axes), args.tokens)))
            except TuneError as error:
                parser.error(str(error))
    if args.axes:
        parser.error("a layout needs --model")
    print("| of 512 processes | GB of parameters | of gradients | to 1/512 of the model | seconds | peak GiB |")
    print("|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        run = subprocess.run([sys.executable, __file__, *layout.split()], capture_output=True, text=True, check=True)
        found = json.loads(run.stdout.splitlines()[-1])
        print(
            f"| `{layout.removeprefix('--model ')}` | {found['parameters'] / 1e9:.3f} | {found['gradients'] / 1e9:.3f} "
            f"| {found['parameters'] * 512 / found['whole']:.3f} | {found['seconds']:.1f} | {found['peak_gib']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

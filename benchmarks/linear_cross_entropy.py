"""Measure memory and time of output projection + cross-entropy, forward and backward: naive, tune, and torch's own.

    python benchmarks/linear_cross_entropy.py [--tokens 4096 --dim 512 --vocabulary 128256 --chunk 512 --device cpu]
    python benchmarks/linear_cross_entropy.py --log-probs  # per label, each with its own gradient

Each variant runs in a separate process, so that each has its own memory peak; rounds alternate and the median is
reported.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from bytes_moved import BytesMoved

from tune.collators import Batch
from tune.losses import LOGITS, LinearCrossEntropy, LogProbs


def naive(hidden, weight, labels, chunk):
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")


def tune(hidden, weight, labels, chunk):
    return LinearCrossEntropy(chunk)(
        hidden[None], weight, Batch.of(labels[None].cpu(), labels[None].cpu()).to(labels.device)
    )


def upstream(hidden, weight, labels, chunk):
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def naive_log_probs(hidden, weight, labels, chunk):
    log_probs = (hidden @ weight.T).float().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    return log_probs @ torch.linspace(-1, 0, len(labels), device=labels.device)


def tune_log_probs(hidden, weight, labels, chunk):
    log_probs = LogProbs(chunk)(
        hidden[None], weight, Batch.of(labels[None].cpu(), labels[None].cpu()).to(labels.device)
    ).log_probs
    return log_probs @ torch.linspace(-1, 0, len(labels), device=labels.device)


CROSS_ENTROPY = {"naive": naive, "tune": tune, "upstream": upstream}
LOG_PROBS = {"naive log-probs": naive_log_probs, "tune log-probs": tune_log_probs}
VARIANTS = CROSS_ENTROPY | LOG_PROBS


def measure(variant, args):
    """Return seconds and extra peak GiB of one forward and backward."""
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.dim, device=args.device, requires_grad=True)
    weight = torch.randn(args.vocabulary, args.dim, device=args.device).mul_(0.02).requires_grad_()
    labels = torch.randint(args.vocabulary, (args.tokens,), device=args.device)
    before = peak(args.device)
    start = time.perf_counter()
    loss = VARIANTS[variant](hidden, weight, labels, args.chunk) / args.tokens
    loss.backward()
    value = loss.item()
    return time.perf_counter() - start, peak(args.device) - before, value, weight.grad.norm().item()


def print_bytes(args):
    """Return the GiB that tune's forward and backward read and write, for a trained and a frozen head."""
    for chunk in (512, 1024, 2048, 4096, max(512, LOGITS // args.vocabulary)):
        moved = []
        for trained in (True, False):
            hidden, weight = (
                torch.empty(rows, args.dim, dtype=torch.bfloat16, device="meta", requires_grad=trains)
                for rows, trains in ((args.tokens, True), (args.vocabulary, trained))
            )
            labels = torch.zeros(1, args.tokens, dtype=torch.long)
            batch = Batch.of(labels, labels).to("meta")
            with BytesMoved() as counted:
                LinearCrossEntropy(chunk)(hidden[None], weight, batch).backward()
            moved.append(counted.total / 2**30)
        print(f"chunks of {chunk:5}: {moved[0]:6.0f} GiB, {moved[1]:6.0f} GiB with a frozen head")


def peak(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 4096, "dim": 512, "vocabulary": 128256, "chunk": 512, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bytes", action="store_true", help="count bytes moved in bf16 by chunk, without computing")
    parser.add_argument("--log-probs", action="store_true", help="compare these instead of cross-entropies")
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one, in this process")
    args = parser.parse_args()
    if args.bytes:
        print_bytes(args)
        return
    if args.variant:
        print(*measure(args.variant, args))
        return
    compared = LOG_PROBS if args.log_probs else CROSS_ENTROPY
    results = {variant: [] for variant in compared if variant != "upstream" or hasattr(F, "linear_cross_entropy")}
    for _ in range(args.rounds):
        for variant, rounds in results.items():
            run = subprocess.run(
                [sys.executable, *sys.argv, "--variant", variant], capture_output=True, text=True, check=True
            )
            rounds.append([float(word) for word in run.stdout.split()])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args}")
    base = [statistics.median(column) for column in zip(*next(iter(results.values())), strict=True)]
    for variant, rounds in results.items():
        seconds, extra, loss, norm = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{variant:15} {seconds:7.2f} s ({seconds / base[0]:.2f}x)   "
            f"extra peak {extra:6.2f} GiB ({extra / base[1]:.3f}x)   loss {loss:.6f}   gradient norm {norm:.8f}"
        )


if __name__ == "__main__":
    main()

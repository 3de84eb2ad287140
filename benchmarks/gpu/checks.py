"""Check components on a device against their definitions. Prints a JSON line per check: name, found, largest wanted.

python benchmarks/gpu/checks.py attention [--device cuda]
python benchmarks/gpu/checks.py nf4
python benchmarks/gpu/checks.py sampler --model FOLDER
"""

import argparse
import itertools
import json
import math
import random
import sys
from dataclasses import replace

import torch
from torch import Tensor

from tune.checkpointers import load_model
from tune.collators import Batch, Documents
from tune.generation import Sampler
from tune.models.attention import Scoring, attend, attend_cached, attend_masked
from tune.quantization import dequantize, quantize

LENGTHS = (70, 1, 129, 56), (256,), (100, 100, 56)  # documents of three rows of 256 tokens
HEADS = 4
SINKS = torch.linspace(-1, 2, HEADS)
SCORINGS = {
    "plain": {},
    "window": {"window": 48},
    "scale": {"scale": 0.1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "window and sinks": {"window": 48, "sinks": SINKS},
}
SIZES = ((64, 64, 2), (128, 128, 1), (128, 128, 4), (192, 128, 4), (256, 256, 2))  # of heads, of values, heads of keys
ROUNDING = {"fp32": 1e-5, "bf16": 2e-2}  # relative errors; gradients of sinks are four small sums
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NF4_LEVELS = (  # of bitsandbytes, create_normal_map
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "nf4", "sampler"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="a checkpoint's folder")
    options = parser.parse_args()
    torch.manual_seed(0)
    match options.what:
        case "attention":
            check_attention(options.device)
        case "nf4":
            check_nf4(options.device)
        case "sampler":
            check_sampler(options.model, options.device)


def report(name: str, found: float, wanted: float) -> None:
    print(json.dumps([name, found, wanted]), flush=True)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the error relative to the norm of the expected values."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def check_attention(device: str) -> None:
    """Outputs and gradients of each path, the worst of all kinds of scores and sizes of heads. The definition is
    computed in fp64."""
    ids = torch.tensor([[number for number, length in enumerate(row) for _ in range(length)] for row in LENGTHS])
    documents = Batch.of(torch.zeros_like(ids), documents=ids).to(device).documents
    sizes = SIZES[:1] if device == "cpu" else SIZES
    for dtype, path in itertools.product(DTYPES, ("packed", "one document a row", "full mask", "cache")):
        worst, case = 0.0, ""
        for kind, (size, value_size, kv_heads) in itertools.product(SCORINGS, sizes):
            shapes = [(3, 256, HEADS, size), (3, 256, kv_heads, size), (3, 256, kv_heads, value_size)]
            heads = [torch.randn(shape, device=device).to(DTYPES[dtype]).requires_grad_() for shape in shapes]
            scoring = Scoring(**SCORINGS[kind])
            if scoring.sinks is not None:
                scoring = replace(scoring, sinks=scoring.sinks.to(heads[0]).requires_grad_())
            try:
                found = attention_error(path, heads, documents, scoring)
            except Exception as error:  # continue with the other cases
                print(f"{path}, {dtype}, {kind}, heads of {size}: {type(error).__name__}: {error}", file=sys.stderr)
                found = math.inf
            if found > worst:
                worst, case = found, f"{kind}, heads of {size}"
        report(f"attention, {path}, {dtype} (worst: {case})", worst, ROUNDING[dtype])


def attention_error(path: str, heads: list[Tensor], documents: Documents, scoring: Scoring) -> float:
    """Return the largest relative error of the output and, except with a cache, of the gradients of heads and sinks."""
    exact, in_fp64 = [exactly(each) for each in heads], scoring
    if scoring.sinks is not None:
        in_fp64 = replace(scoring, sinks=exactly(scoring.sinks))
    ids = documents.ids if path in ("packed", "full mask") else torch.zeros_like(documents.ids)
    expected = definition(*exact, ids, in_fp64)
    if path == "cache":
        return difference(last_by_cache(*heads, scoring), expected[:, -1:])
    function = attend_masked if path == "full mask" else attend
    output = function(*heads, None if path == "one document a row" else documents, scoring)
    weights = torch.randn_like(output)
    sinks = [(scoring.sinks, in_fp64.sinks)] if scoring.sinks is not None else []
    inputs, exact_inputs = zip(*zip(heads, exact, strict=True), *sinks, strict=True)
    found = output, *torch.autograd.grad(output, inputs, weights)
    wanted = expected, *torch.autograd.grad(expected, exact_inputs, weights.double())
    return max(map(difference, found, wanted))


def exactly(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def last_by_cache(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute attention of the last tokens, as in sampling: `[rows, 1, heads, value_size]`."""
    slots = torch.arange(key.shape[1], device=key.device)
    hidden = slots < key.shape[1] - (scoring.window or key.shape[1])
    bias = torch.zeros(len(key), 1, len(slots), device=key.device).masked_fill_(hidden, -torch.inf)
    with torch.no_grad():
        return attend_cached(query[:, -1:], key.transpose(1, 2), value.transpose(1, 2), bias, scoring)


def definition(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, scoring: Scoring) -> Tensor:
    """Compute the softmax over tokens of the same document (`ids` `[rows, seq]`) up to the token itself."""
    groups = query.shape[2] // key.shape[2]
    key, value = (each.repeat_interleave(groups, dim=2) for each in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (scoring.scale or query.shape[-1] ** -0.5)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    order = torch.arange(query.shape[1], device=query.device)
    distance = order[:, None] - order
    visible = (distance >= 0) & (distance < (scoring.window or len(order))) & (ids[:, :, None] == ids[:, None, :])
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., : len(order)], value)


def check_nf4(device: str) -> None:
    """Check that each code is the nearest level and decodes to the level times the scale of its block."""
    weight = torch.randn(512, 1024, device=device)
    levels = torch.tensor(NF4_LEVELS, device=device, dtype=torch.float64)
    codes, scales, _ = quantize(weight)
    numbers = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1).long()
    largest = weight.double().unflatten(1, (-1, 64)).abs().amax(dim=2, keepdim=True)
    normalized = (weight.double().unflatten(1, (-1, 64)) / largest).flatten(1)
    to_level = (normalized - levels[numbers]).abs()
    to_nearest = torch.stack([(normalized - level).abs() for level in levels]).amin(dim=0)
    report("NF4, distance to the level of a code beyond the nearest one", (to_level - to_nearest).max().item(), 1e-6)
    values = (levels[numbers].unflatten(1, (-1, 64)) * largest).flatten(1)
    for dtype, rounding in (("fp32", 1e-6), ("bf16", 3e-3)):
        found = dequantize(codes, scales, None, DTYPES[dtype])
        report(f"NF4, {dtype} values to level x scale", difference(found, values), rounding)
        on_device = quantize(weight, double=True)
        found = dequantize(*on_device, DTYPES[dtype])
        expected = dequantize(*quantize(weight.cpu(), double=True), DTYPES[dtype])
        report(f"NF4 with double, {dtype} values vs. the CPU", difference(found.cpu(), expected.double()), 1e-6)


def check_sampler(folder: str, device: str) -> None:
    """Check samples made with a cache by a forward over the whole text without one."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 900) for _ in range(draw.randint(5, 60))] for _ in range(12)]
    for dtype, within in (("fp32", 1e-4), ("bf16", 5e-2)):
        model = load_model(folder, device, dtype)
        for temperature in (0.0, 1.0):
            sampler = Sampler(max_new_tokens=24, temperature=temperature, max_rows=8)  # fewer rows than prompts
            answers = [answer for (answer,) in sampler(model, prompts)]
            worst = shortfall = 0.0
            for prompt, answer in zip(prompts, answers, strict=True):
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + answer.tokens], device=device))[0].double()
                log_probs = logits[len(prompt) - 1 : -1].log_softmax(dim=-1).cpu()
                of_tokens = log_probs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
                worst = max(worst, (of_tokens - torch.tensor(answer.log_probs)).abs().max().item())
                shortfall = max(shortfall, (log_probs.amax(dim=1) - of_tokens).max().item())
            if temperature == 0:
                report(f"sampler, {dtype}, greedy: log-probability below the most likely token's", shortfall, within)
            else:
                report(f"sampler, {dtype}, temperature 1: log-probabilities to those without a cache", worst, within)


if __name__ == "__main__":
    main()

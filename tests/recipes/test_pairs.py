"""All pairs of settings that decide how a step is computed: two steps of each give the numbers of the plain way."""

import functools
import importlib
import itertools
import json
import random
import sys

import pytest
import torch
from helpers import save_checkpoint

from tune import config
from tune.distributed.activations import wrap_forward
from tune.errors import TuneError

# What the numbers depend on.
WHAT = {
    "trained": {
        "all": [],
        "all, int8": ["quantization.qat=int8", "export.dtype=bf16"],
        "lora, int8": ["adapter.rank=4", "quantization.qat=int8"],
        "lora, float8": ["adapter.rank=4", "quantization.float8=rowwise_with_gw_hp"],
        "lora": ["adapter.rank=4"],
        "dora": ["adapter.dora=true"],
        "pissa": ["adapter.init=pissa"],
        "head": ["adapter.target_modules=[q_proj,lm_head,embed_tokens]"],
        "tokens": ["adapter.trainable_tokens=[2,30,7]", "adapter.modules_to_save=[norm]"],
        "distilled": ["adapter.rank=4", "loss.temperature=2", "loss.cross_entropy=0.3"],
        "experts": ["adapter.target_modules='.*(q_proj|experts.*)'"],
        "DPO": ["adapter.rank=4", "reference=adapter_off"],
        "KTO": ["adapter.rank=4", "loss._component_=tune.losses.KTO"],
    },
    "dropout": {"0": [], "0.2": ["adapter.dropout=0.2"]},
    "quantization": {
        "null": [],
        "nf4": ["quantization.weights=nf4", "quantization.double=false"],
        "double": ["quantization.weights=nf4"],
    },
    "optimizer": {
        "AdamW": [],
        "SGD": ["optimizer._component_=torch.optim.SGD"],
        "Adafactor": ["optimizer._component_=tune.optimizers.Adafactor"],
        "Muon": ["optimizer._component_=tune.optimizers.Muon"],
        "AdamW8bit": ["optimizer._component_=torchao.optim.AdamW8bit"],
    },
    "dtype": {"fp32": [], "bf16/fp32": ["dtype=bf16"], "bf16": ["dtype=bf16", "master_dtype=bf16"]},
    "packed": {"false": [], "true": ["packed=true"]},
}
# What they do not depend on; the first of each is the plain way.
HOW = {
    "compile": {"false": [], "true": ["compile=true"], "one": ["compile=[blocks.1]"]},
    "checkpointing": {each: [f"memory.activation_checkpointing={each}"] for each in ("none", "selective", "full")},
    "activation_offload": {"false": [], "true": ["memory.activation_offload=true"]},
    "cpu_offload": {"false": [], "true": ["memory.cpu_offload=true"]},
    "in_backward": {"false": ["micro_batch_size=4"], "true": ["optimizer_in_backward=true"]},
}
FACTORS = WHAT | HOW
PLAIN = {name: next(iter(values)) for name, values in HOW.items()}
REFUSED = {
    "adapter: is not a setting. It is one of": {"trained": "all", "dropout": "0.2"},
    "quantization.weights: is not a setting": {"trained": "all", "quantization": "nf4"},
    "quantization.weights: is not a sett": {"trained": "all", "quantization": "double"},
    "adapter: is not a setting. It is one": {"trained": "all, int8", "dropout": "0.2"},
    "quantization.weights: is not a se": {"trained": "all, int8", "quantization": "nf4"},
    "quantization.weights: is not a s": {"trained": "all, int8", "quantization": "double"},
    "adapter.dropout: with quantization.qat": {"trained": "lora, int8", "dropout": "0.2"},
    "quantization.weights: it does not go": {"trained": "lora, float8", "quantization": "nf4"},
    "quantization.weights: it does not g": {"trained": "lora, float8", "quantization": "double"},
    "quantization.qat: .* is quantised": {"trained": "lora, int8", "quantization": "nf4"},
    "quantization.qat: .* is quantised already": {"trained": "lora, int8", "quantization": "double"},
    "quantization.qat: .* is exported as": {"trained": "lora, int8", "dtype": "bf16/fp32"},
    "quantization.qat: .* is exported as float32": {"trained": "lora, int8", "dtype": "bf16"},
    "memory.cpu_offload: gradients may still": {"in_backward": "true", "cpu_offload": "true"},
    "memory.activation_offload: what activation_checkpointing=selective keeps": {
        "activation_offload": "true", "checkpointing": "selective", "compile": "false"
    },
    "memory.activation_offload: what activation_checkpointing=selective keeps is": {
        "activation_offload": "true", "checkpointing": "selective", "compile": "one"
    },
}  # fmt: skip


def covering(draw, factors, refused):
    """Rows in which every two values of two settings occur together, unless they are refused. Each row takes in as many
    of the pairs that are left as the best of some greedy tries does, and else the plain values, which cost least."""
    values = {name: [(name, value) for value in factors[name]] for name in factors}

    def is_refused(row):
        return any(settings.items() <= row.items() for settings in refused)

    left = {
        frozenset(pair)
        for one, other in itertools.combinations(factors, 2)
        for pair in itertools.product(values[one], values[other])
        if not is_refused(dict(pair))
    }

    def greedy(pairs):
        row = dict(draw.choice(pairs))
        for name in draw.sample(sorted(factors.keys() - row), len(factors) - len(row)):
            allowed = [value for value in values[name] if not is_refused(row | dict([value]))]
            row |= [max(allowed, key=lambda value: sum(frozenset([value, each]) in left for each in row.items()))]
        return row

    while left:
        first = sorted(map(sorted, left))
        tries = {
            frozenset(map(frozenset, itertools.combinations(row.items(), 2))): row
            for row in (greedy(first) for _ in range(30))
        }
        pairs = max(tries, key=lambda pairs: len(pairs & left))
        left -= pairs
        yield tries[pairs]


def described(row):
    return pytest.param(row, id=",".join(row[name] for name in FACTORS))


@pytest.fixture(scope="module")
def run(chats, pairs, checkpoint, tmp_path_factory):
    """Runs two steps of settings; returns loss and norm of the gradient of each."""
    experts = save_checkpoint(
        tmp_path_factory.mktemp("experts"), "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, head_dim=16,
        moe_intermediate_size=32, num_hidden_layers=2,
    )  # fmt: skip

    teacher = save_checkpoint(tmp_path_factory.mktemp("teacher"), num_hidden_layers=2)

    def run(row):
        is_compared = row["trained"] in ("DPO", "KTO")
        recipes = dict.fromkeys(("all", "all, int8"), "full_finetune") | {"distilled": "distill"}
        recipe = recipes.get(row["trained"], "lora_finetune")
        if is_compared:
            recipe = "preference_finetune"
        folder = tmp_path_factory.mktemp("run")
        settings = [setting for name, value in row.items() for setting in FACTORS[name][value]]
        if recipe == "distill":
            settings.append(f"teacher.path={teacher}")
        cfg = config.load(
            recipe,
            [
                f"model.path={experts if row['trained'] == 'experts' else checkpoint}",
                f"dataset.path={pairs if is_compared else chats}",
                f"output_dir={folder}", "max_seq_len=128", "device=cpu", "dtype=fp32", "global_batch_size=8",
                "micro_batch_size=8", "max_steps=2", "max_grad_norm=null", "optimizer.lr=1e-3", "schedule.warmup=0",
                "checkpointer.every=null", *settings,
            ],
        )  # fmt: skip
        importlib.import_module(recipe).main(cfg)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["loss"], line["grad_norm"]) for line in lines]

    return run


@pytest.fixture(scope="module")
def plainly(run):
    """What the plain way gives, computed once for all ways."""

    @functools.cache
    def numbers(*what):
        with torch.compiler.set_stance("force_eager"):  # torchao's optimizers compile themselves
            return run(dict(what) | PLAIN)

    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("row", [described(row) for row in covering(random.Random(2), FACTORS, REFUSED.values())])
def test_each_way_gives_the_numbers_of_the_plain_one(row, run, plainly, monkeypatch):
    expected = plainly(*((name, row[name]) for name in WHAT))
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    if row["activation_offload"] == "true":  # there is nowhere to offload to from a CPU, and a setting would say so
        offloading = functools.partial(wrap_forward, offload=True)
        monkeypatch.setattr(
            sys.modules["tune.distributed.parallelize"], "wrap_forward", lambda *given, **_: offloading(*given[:-1])
        )
    with torch.compiler.set_stance("default" if row["compile"] != "false" else "force_eager"):
        found = run(row | {"activation_offload": "false"})
    tolerance = 3e-2 if row["dtype"] != "fp32" else 3e-3 if row["trained"] == "lora, float8" else 1e-4
    assert found == [pytest.approx(each, rel=tolerance) for each in expected] and len(found) == 2


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message, run):
    row = {name: next(iter(FACTORS[name])) for name in FACTORS} | {"trained": "lora"} | REFUSED[message]
    with pytest.raises(TuneError, match=message):
        run(row)

"""The recipes train models that only transformers implements like a plain transformers loop."""

import json
from pathlib import Path

import full_finetune
import lora_finetune
import pytest
import torch
import torch.nn.functional as F
from helpers import curve_steps, run_processes, save_checkpoint

from tune import config
from tune.datasets import DataLoader, load
from tune.tokenizers import Tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
# Attention with and without packing; no attention; two kinds of blocks with experts; heads of several sizes.
ARCHITECTURES = {
    "neox": ("GPTNeoXConfig", {"tie_word_embeddings": False}),
    "opt": ("OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "mamba": ("MambaConfig", {"state_size": 4, "tie_word_embeddings": True}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16,
            "num_kv_shared_layers": 2, "num_hidden_layers": 4,
        },
    ),
}  # fmt: skip
TARGETS = {"neox": ["query_key_value", "dense_4h_to_h"], "opt": ["q_proj", "fc1"]}
RECIPES = {"full_finetune": full_finetune, "lora_finetune": lora_finetune}


class Alone:
    data_rank, data_size, device = 0, 1, torch.device("cpu")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request, tmp_path_factory):
    config_class, changes = ARCHITECTURES[request.param]
    return request.param, save_checkpoint(tmp_path_factory.mktemp(request.param), config_class, **changes)


@pytest.fixture
def common(architecture, chats):
    return [
        f"model.path={architecture[1]}", f"dataset.path={chats}", "max_seq_len=128",
        "global_batch_size=8", "compute.dtype=fp32", "device=cpu", "optimizer.lr=1e-3", "optimizer.weight_decay=0.0",
        f"max_steps={curve_steps()}", "epochs=6", "schedule._component_=tune.optimizers.constant", "schedule.warmup=0",
        "max_grad_norm=null", "checkpointer.every=null",
    ]  # fmt: skip


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def plain_loop(model, folder, chats):
    """Return the losses of some AdamW steps, one document at a time."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    dataset = load(Tokenizer(str(folder)), str(chats), max_seq_len=128)
    curve = []
    for _, batch in DataLoader(dataset, Alone(), 8, 1, max_steps=curve_steps(), epochs=6, seed=0):
        total = 0.0
        for row in batch.micro_batches:
            loss = F.cross_entropy(model(row.tokens).logits[0], row.labels[0], reduction="sum") / batch.num_supervised
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(total)
    return curve


def train(recipe, *overrides):
    RECIPES[recipe].main(config.load(recipe, list(overrides)))


VARIANTS = {"one row": [], "four rows": ["micro_batch_size=4"]}


@pytest.mark.weekly
def test_full_finetuning(architecture, common, chats, tmp_path):
    _, folder = architecture
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = plain_loop(theirs, folder, chats)
    (tmp_path / "prompts.txt").write_text("the cat\na very big dog and\nit was\n")
    common += [f"evaluate.prompts={tmp_path}/prompts.txt", "evaluate.max_new_tokens=5"]
    recomputed = ["micro_batch_size=4", "compute.activation_checkpointing=full"]
    for name, overrides in {"one row": [], "four rows, recomputed": recomputed}.items():
        train("full_finetune", *common, *overrides, f"output_dir={tmp_path / name}")
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5), name
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one row" / "model").eval()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(trained(tokens).logits, theirs(tokens).logits, atol=2e-3, rtol=2e-3)
    assert json.loads((tmp_path / "one row" / "model" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    packed = {"packed": ["packed=true", "max_seq_len=256"]}
    train("full_finetune", *common, *packed["packed"], f"output_dir={tmp_path / 'packed alone'}")
    variants = {"one row": [], "four rows": ["micro_batch_size=4", "compute.activation_checkpointing=selective"]}
    arguments = json.dumps(common), json.dumps(variants | packed)
    run_processes(RUN_VARIANTS, 2, "full_finetune", str(tmp_path / "2"), *arguments)
    for name in variants:
        assert losses(tmp_path / "2" / name) == pytest.approx(expected, rel=1e-5), name
    assert losses(tmp_path / "2" / "packed") == pytest.approx(losses(tmp_path / "packed alone"), rel=1e-5)
    first = [file.read_text().splitlines()[:3] for file in tmp_path.rglob("samples.jsonl")]  # before the first step
    assert first == [first[0]] * 6


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("architecture", ["neox", "opt"], indirect=True)
def test_lora(architecture, common, chats, tmp_path):
    name, folder = architecture
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    settings = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=TARGETS[name])
    theirs = peft.get_peft_model(base, settings).eval()
    theirs.save_pretrained(tmp_path / "start")
    expected = plain_loop(theirs, folder, chats)
    start = [*common, f"adapter.path={tmp_path / 'start'}"]
    for variant, overrides in VARIANTS.items():
        train("lora_finetune", *start, *overrides, f"output_dir={tmp_path / variant}")
        assert losses(tmp_path / variant) == pytest.approx(expected, rel=1e-5), variant
    dropout = {"dropout": [f"adapter.target_modules={TARGETS[name]}", "adapter.dropout=0.3", "adapter.path=null"]}
    train("lora_finetune", *common, *dropout["dropout"], "micro_batch_size=2", f"output_dir={tmp_path / 'dropout'}")
    run_processes(
        RUN_VARIANTS, 2, "lora_finetune", str(tmp_path / "2"), json.dumps(start), json.dumps(VARIANTS | dropout)
    )
    for variant in VARIANTS:
        assert losses(tmp_path / "2" / variant) == pytest.approx(expected, rel=1e-5), variant
    assert losses(tmp_path / "2" / "dropout") == pytest.approx(losses(tmp_path / "dropout"), rel=1e-5)
    assert losses(tmp_path / "dropout") != pytest.approx(expected, rel=1e-4)
    adapted = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "one row" / "adapter"
    ).eval()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, theirs(tokens).logits, atol=2e-3, rtol=2e-3)

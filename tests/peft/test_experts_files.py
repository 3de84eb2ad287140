"""Adapters of experts, in the files of PEFT: it loads them for all experts at once, vLLM one by one."""

import json
from pathlib import Path

import lora_finetune
import pytest
import torch
from helpers import run_processes, save_checkpoint
from models.test_families import VARIANTS
from safetensors import safe_open
from torch.testing import assert_close

from tune import config, distributed
from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.peft import LoRA, add_adapters, export_adapter, load_adapter, merge, read_adapter
from tune.tokenizers import Tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RUN_VARIANTS = Path(__file__).parents[1] / "recipes" / "run_variants.py"
TOKENS = torch.arange(5, 85).view(2, 40)
TARGETS = {
    "mixtral": ["q_proj", "w1", "w2", "w3"],
    "qwen3_moe": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    "deepseek_v3": r".*(o_proj|experts\.\d+\.\w+_proj)",
    "gpt_oss": ["q_proj", "gate_up_proj", "experts.down"],
}


def checkpoint_of(family, folder):
    config_class, changes = VARIANTS[family]
    return save_checkpoint(folder, config_class, **{"pad_token_id": None} | changes)


@pytest.mark.parametrize("family", TARGETS)
def test_peft_and_merge(family, tmp_path):
    folder = checkpoint_of(family, tmp_path / "base")
    model, lora = load_model(str(folder)), LoRA(rank=4, alpha=12, dropout=0.1, target_modules=TARGETS[family])
    before = model(TOKENS)
    add_adapters(model, lora)
    assert_close(model(TOKENS), before, atol=1e-6, rtol=1e-6)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    logits = model(TOKENS)
    assert (logits - before).abs().max() > 1e-2
    world, adapter = distributed.init("cpu"), tmp_path / "adapter"
    export_adapter(model, lora, adapter, world, base=str(folder), tokenizer=Tokenizer(str(folder)))
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as tensors:
        names = [name for name in tensors.keys() if ".experts." in name and name.endswith("lora_A.weight")]  # noqa: SIM118
    each = {f"experts.{number}." for number in range(4)} if family != "gpt_oss" else {"experts.lora", "experts.base_layer."}
    assert all(any(kind in name for name in names) for kind in each)

    again = load_model(str(folder))
    add_adapters(again, read_adapter(str(adapter)))
    load_adapter(again, str(adapter))
    assert torch.equal(again(TOKENS), logits)
    merge(folder, adapter, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert_close(merged(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    assert_close(theirs(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mixtral", {"target_modules": ["w1"]}, "gate and up of experts go together"),
        ("mixtral", {"target_modules": ["w1", "w2", "w3"], "dora": True}, "are experts, which dora=true has no form"),
        ("mixtral", {"target_modules": ["w1", "w2", "w3"], "rank_pattern": {"w2": 2}}, "experts take adapter.rank"),
        ("deepseek_v3", {"target_modules": ["gate_proj", "up_proj"]}, "is called as the projections of experts are"),
        ("gpt_oss", {"target_modules": ["experts.gate_up"]}, "that a checkpoint holds as one tensor"),
    ],
)
def test_refused(family, settings, message, tmp_path):
    model = load_model(str(checkpoint_of(family, tmp_path)))
    with pytest.raises(TuneError, match=message):
        add_adapters(model, LoRA(rank=4, **settings))


@pytest.mark.slow
def test_one_and_two_processes(chats, tmp_path):
    """Dropout included: its masks follow the tokens to their experts."""
    folder = checkpoint_of("mixtral", tmp_path / "base")
    common = [
        f"model.path={folder}", f"dataset.path={chats}", "max_seq_len=128", "global_batch_size=8", "dtype=fp32",
        "device=cpu", "optimizer.lr=5e-3", "max_steps=5", "epochs=12", "adapter.rank=4", "checkpointer.every=null",
        "adapter.target_modules=[w1,w2,w3]", "adapter.dropout=0.2",
    ]  # fmt: skip
    lora_finetune.main(config.load("lora_finetune", [*common, f"output_dir={tmp_path / '1'}"]))
    run_processes(RUN_VARIANTS, 2, "lora_finetune", str(tmp_path), json.dumps(common), json.dumps({"2": []}))
    alone, together = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()] for name in "12"
    )
    assert together == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0] - 0.05

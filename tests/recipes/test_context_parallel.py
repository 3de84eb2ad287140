"""The loss curve is the same when processes share the tokens of each row (context parallelism)."""

import pytest
from helpers import save_checkpoint
from models.test_families import SMALL, VARIANTS
from recipes.test_tensor_parallel import (
    LORA,
    NF4,
    assert_curve_in_backward,
    assert_one_curve,
    common,  # noqa: F401
    wide,  # noqa: F401
)

LAYOUTS = {
    "cp x FSDP": ["parallel.cp=2", "micro_batch_size=4"],
    "cp x HSDP": ["parallel.cp=2", "parallel.dp_replicate=2", "micro_batch_size=4"],
    "cp": ["parallel.cp=4"],
    "cp x tp": ["parallel.cp=2", "parallel.tp=2"],
}


@pytest.mark.slow
def test_two_processes_share_each_row(wide, chats, common, tmp_path):  # noqa: F811
    variants = {
        "packed": [f"model.path={wide}", "loss.accuracy=true", f"evaluate.general={chats}"],
        "plain": [f"model.path={wide}", "packed=false", "compute.activation_checkpointing=full"],
        "odd lengths": [f"model.path={wide}", "max_seq_len=93"],
    }
    assert_one_curve("full_finetune", common, variants, {"cp": ["parallel.cp=2", "micro_batch_size=2"]}, 2, tmp_path)


@pytest.mark.slow
def test_all_parameters(checkpoint, common, tmp_path):  # noqa: F811
    pytest.importorskip("transformers")
    names = {
        "packed": list(LAYOUTS),
        "recomputed": ["cp x FSDP"],
        "gemma3_text-scaled": ["cp"],
        "gpt_oss": ["cp x tp"],
        "deepseek_v3": ["cp"],
    }
    variants = {
        "packed": [],
        "recomputed": ["compute.activation_checkpointing=selective"],
    }
    for name in names.keys() - variants:
        kind, changes = VARIANTS[name]
        save_checkpoint(tmp_path / name, kind, **SMALL | changes | {"vocab_size": 300})
        variants[name] = [f"model.path={tmp_path / name}"]
    common = [*common, f"model.path={checkpoint}"]
    assert_one_curve("full_finetune", common, variants, LAYOUTS, 4, tmp_path / "runs", names)


@pytest.mark.slow
def test_in_backward(checkpoint, common, tmp_path):  # noqa: F811
    layouts = {"cp x HSDP": LAYOUTS["cp x HSDP"]}
    assert_curve_in_backward(common, {"all": [f"model.path={checkpoint}"]}, layouts, 4, tmp_path)


@pytest.mark.weekly
def test_adapters(wide, common, tmp_path):  # noqa: F811
    variants = {
        "LoRA": LORA,
        "NF4 with DoRA": [*LORA, *NF4, "adapter.dora=true"],
        "head and embedding": ["adapter.rank=4", "adapter.target_modules=[q_proj,lm_head,embed_tokens]"],
    }
    names = {name: ["cp x tp"] for name in variants} | {"LoRA": ["cp x HSDP", "cp x tp"]}
    common = [*common, f"model.path={wide}"]
    assert_one_curve("lora_finetune", common, variants, LAYOUTS, 4, tmp_path, names)

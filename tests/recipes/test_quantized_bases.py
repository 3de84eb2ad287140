"""A run on a quantized checkpoint equals the run on its dequantized copy, from the plan to the merged model."""

import json
import shutil
from pathlib import Path

import lora_finetune
import packed_checkpoints as made
import pytest
import torch
from checkpointers.test_packed import DEEPSEEK, FORMS, GPT_OSS, change, save_plain
from helpers import run_processes, save_checkpoint
from safetensors.torch import load_file

from tune import config
from tune.cli import main

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
BASES = {
    "llama": (made.fp8, "LlamaConfig", {}, "FineGrainedFP8Config", ["parallel.tp=2"]),
    "deepseek_v3": (made.fp8, "DeepseekV3Config", DEEPSEEK, "FineGrainedFP8Config", ["parallel.ep=2"]),
    "gpt_oss": (made.mxfp4, "GptOssConfig", GPT_OSS, "Mxfp4Config", ["parallel.ep=2"]),
}


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def settings_of(path, chats):
    return [
        f"model.path={path}", f"dataset.path={chats}", "max_seq_len=128", "global_batch_size=8", "micro_batch_size=2",
        "compute.dtype=fp32", "device=cpu", "optimizer.lr=5e-3", "max_steps=3", "adapter.rank=8",
        "checkpointer.every=null", "export.merge=true", "adapter.target_modules='.*(q_proj|q_b_proj|o_proj)'",
    ]  # fmt: skip


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("family", BASES)
def test_training_matches_the_plain_base(family, chats, tmp_path):
    make, kind, shape, how, layout = BASES[family]
    base = make(save_checkpoint(tmp_path / "base", kind, **shape))
    plain = save_plain(base, tmp_path / "plain")
    for path in (base, plain):
        lora_finetune.main(
            config.load("lora_finetune", [*settings_of(path, chats), f"output_dir={tmp_path / path.name}-run"])
        )
    run = tmp_path / "base-run"
    assert losses(run) == losses(tmp_path / "plain-run") and losses(run)[-1] < losses(run)[0]

    # The merged model is not quantized, and matches PEFT's merge into transformers' dequantized base.
    assert "quantization_config" not in json.loads((run / "model" / "config.json").read_text())
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(base, dtype="auto", quantization_config=getattr(transformers, how)(dequantize=True)).float()
    theirs = peft.PeftModel.from_pretrained(theirs, run / "adapter").merge_and_unload()
    merged = load(run / "model", dtype="auto")
    assert {tensor.dtype for tensor in load_file(run / "model" / "model.safetensors").values()} == {torch.bfloat16}
    expected = {name: tensor.bfloat16() for name, tensor in theirs.state_dict().items()}
    torch.testing.assert_close(merged.state_dict(), expected, rtol=2**-7, atol=1e-6, check_dtype=False)
    changed = [
        name
        for name, tensor in load(plain, dtype="auto").state_dict().items()
        if not torch.equal(tensor, expected[name])
    ]
    assert changed and all(name.split(".")[-2] in ("q_proj", "q_b_proj", "o_proj") for name in changed)

    # Each of two processes reads its own slices, for NF4 too.
    variants = {
        "shared": layout,
        "qlora": ["model.quantization=nf4"],
        "qlora of plain": [f"model.path={plain}", "model.quantization=nf4"],
    }
    common = settings_of(base, chats)
    run_processes(RUN_VARIANTS, 2, "lora_finetune", str(tmp_path), json.dumps(common), json.dumps(variants))
    assert losses(tmp_path / "shared") == pytest.approx(losses(run), rel=1e-5)
    assert losses(tmp_path / "qlora") == losses(tmp_path / "qlora of plain") != losses(run)


@pytest.mark.slow
def test_validate_and_plan(checkpoint, chats, told, tmp_path, capsys):
    """On disk, the width of these weights is a tensor."""
    base = made.compressed(Path(shutil.copytree(checkpoint, tmp_path / "base")), FORMS["int8"][0], **FORMS["int8"][1])
    settings = [*settings_of(base, chats), f"output_dir={tmp_path / 'none'}"]
    plan = ["plan", "lora_finetune", "--device", "h100"]
    assert told("lora_finetune", settings) == ""
    main([*plan, *settings])
    planned = capsys.readouterr().out
    main([*plan, *settings, f"model.path={checkpoint}"])
    assert planned.replace(str(base), "") == capsys.readouterr().out.replace(str(checkpoint), "")
    change(base, quant_method="hqq")
    assert "hqq" in told("lora_finetune", settings)
    with pytest.raises(SystemExit):
        main([*plan, *settings])

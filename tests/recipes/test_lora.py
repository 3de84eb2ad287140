"""lora_finetune trains what PEFT trains, in every layout, and leaves the base unchanged."""

import json
from pathlib import Path

import lora_finetune
import pytest
import torch
import torch.nn.functional as F
from edited_recipes import run_edited
from helpers import curve_steps, run_processes, weekly_but
from safetensors.torch import load_file

from tune.checkpointers import load_model
from tune.datasets import DataLoader, load
from tune.errors import TuneError
from tune.run import Run
from tune.tokenizers import Tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
KINDS = {
    "lora": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "dora": {"target_modules": r".*(k|up)_proj", "use_dora": True},
}
VARIANTS = {
    "lora": [],
    "micro-batches of 4": ["micro_batch_size=4"],
    "packed": ["packed=true"],
    "dropout": ["adapter.dropout=0.3"],
    "dropout, micro-batches of 1, recomputed": [
        "adapter.dropout=0.3", "micro_batch_size=1", "compute.activation_checkpointing=full"
    ],
    "dora with dropout": ["adapter.dropout=0.2", "adapter.dora=true"],
    "head, embedding": ["adapter.target_modules=[lm_head,embed_tokens]", "adapter.dropout=0.2"],
    "head with dora": ["adapter.target_modules=[lm_head,q_proj]", "adapter.dropout=0.2", "adapter.dora=true"],
    "trained whole": ["adapter.modules_to_save=[norm,embed_tokens,lm_head]"],
    "some tokens": ["adapter.trainable_tokens=[2,30,7]"],
    "pissa": ["adapter.init=pissa"],
    "rounded, recomputed": ["edit=int8", "compute.activation_checkpointing=full"],
}  # fmt: skip


class Alone:
    data_rank, data_size, device = 0, 1, torch.device("cpu")


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(folder, *overrides):
    run_edited("lora_finetune", [*overrides, f"output_dir={folder}"])
    return losses(folder)


@pytest.fixture
def common(checkpoint, chats):
    return [
        f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=128", "global_batch_size=8",
        "compute.dtype=fp32", "device=cpu", "optimizer.lr=5e-3", "max_steps=12", "epochs=12", "adapter.rank=8",
        "checkpointer.every=null",
    ]  # fmt: skip


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("kind", weekly_but(["lora"], KINDS))
def test_curve_matches_peft(kind, checkpoint, chats, common, tmp_path):
    """Compare 20 steps from one adapter with a loop of peft and transformers."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    settings = peft.LoraConfig(r=8, lora_alpha=16, init_lora_weights=False, task_type="CAUSAL_LM", **KINDS[kind])
    model = peft.get_peft_model(base, settings)
    model.save_pretrained(tmp_path / "start")
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    dataset = load(Tokenizer(str(checkpoint)), str(chats), max_seq_len=128)
    expected = []
    for _, batch in DataLoader(dataset, Alone(), 8, 1, epochs=12, max_steps=20, seed=0):
        total = 0.0
        for row in batch.micro_batches:
            loss = F.cross_entropy(model(row.tokens).logits[0], row.labels[0], reduction="sum") / batch.num_supervised
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)

    schedule = ["schedule._component_=tune.optimizers.constant", "schedule.warmup=0"]
    start = [f"adapter.path={tmp_path / 'start'}", "max_steps=20"]
    assert train(tmp_path / "run", *common, *schedule, *start) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.5


def require_merged(run, base):
    """Assert that the exported model is the original base with the run's adapter merged."""
    lora_finetune.peft.merge(base, run / "adapter", run / "merged")
    exported, expected = (load_file(run / name / "model.safetensors") for name in ("model", "merged"))
    torch.testing.assert_close(exported, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_layouts(checkpoint, common, tmp_path):
    common = [*common, f"max_steps={curve_steps()}"]
    alone = {name: train(tmp_path / name, *common, *overrides) for name, overrides in VARIANTS.items()}
    assert alone["micro-batches of 4"] == pytest.approx(alone["lora"], rel=1e-5)
    assert alone["dropout"] == pytest.approx(alone["dropout, micro-batches of 1, recomputed"], rel=1e-5)
    assert alone["dropout"] != pytest.approx(alone["lora"], rel=1e-3)
    for count, names in (2, [*VARIANTS][4:]), (4, ["lora", "dropout"]):  # sharing rows does not depend on adapters
        folder, variants = tmp_path / str(count), {name: VARIANTS[name] for name in names}
        merging = [*common, "export.merge=true"]
        run_processes(RUN_VARIANTS, count, "lora_finetune", str(folder), json.dumps(merging), json.dumps(variants))
        for name in variants:
            within = 1e-3 if "rounded" in name else 1e-5  # a weight halfway between two codes may be rounded either way
            assert losses(folder / name) == pytest.approx(alone[name], rel=within), (count, name)
            require_merged(folder / name, checkpoint)


@pytest.mark.slow
def test_base_and_checkpoint(checkpoint, common, tmp_path, monkeypatch):
    """The base is bitwise unchanged; a checkpoint holds only adapters and their optimizer states."""
    run, models = tmp_path / "run", []
    finish = Run.finish
    monkeypatch.setattr(Run, "finish", lambda run: models.append(run.checkpointer.model) or finish(run))
    train(run, *common, "export.merge=true")
    for name, parameter in load_model(str(checkpoint)).named_parameters():
        assert torch.equal(models[0].get_parameter(name), parameter)
    adapter = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint), run / "adapter"
    )
    trained = [p for name, p in adapter.named_parameters() if "lora" in name]
    stored = sum(file.stat().st_size for file in (run / "checkpoints" / "step-00000012").iterdir())
    # Each weight with its two moments, and up to 3 kB of headers per tensor, a lot for such small tensors.
    assert stored <= 3 * (4 * sum(p.numel() for p in trained) + 3000 * len(trained))
    tokens = torch.arange(50)[None]
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    torch.testing.assert_close(merged(tokens).logits, adapter(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_validation_uses_no_dropout(checkpoint, chats, common, tmp_path):
    """The validation loss is the trained adapter's loss in PEFT's evaluation mode."""
    train(tmp_path, *common, "adapter.dropout=0.3", "max_steps=3", "evaluate.every=1", f"dataset.validation={chats}")
    reported = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"]
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    loss_sum, count = 0.0, 0
    for sample in load(Tokenizer(str(checkpoint)), str(chats), max_seq_len=128).samples:
        labels = torch.from_numpy(sample.labels).long()
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens).long()[None]).logits[0]
        loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    assert reported == pytest.approx(loss_sum / count, rel=1e-5)


@pytest.mark.slow
def test_resume_is_exact(common, tmp_path):
    whole = train(tmp_path / "whole", *common, "adapter.dropout=0.2")
    first = [*common, "adapter.dropout=0.2", "checkpointer.every=5", "checkpointer.keep=null"]
    train(tmp_path / "run", *first)
    resumed = train(tmp_path / "resumed", *first, f"resume={tmp_path / 'run' / 'checkpoints' / 'step-00000005'}")
    assert resumed == whole[5:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("nf4 model.double_quantization=true", "null"),
        ("null", "nf4 model.double_quantization=false"),
        ("nf4 model.double_quantization=true", "nf4 model.double_quantization=false"),
    ],
)
def test_resume_with_another_quantization_is_refused(common, tmp_path, then, now):
    then, now = (f"model.quantization={setting}" for setting in (then, now))
    train(tmp_path, *common, *then.split(), "max_steps=1")
    with pytest.raises(TuneError, match=rf"with {then}; .* with {now} has other weights"):
        train(tmp_path, *common, *now.split(), "max_steps=2")


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("double", ["true", "false"])
def test_qlora(checkpoint, common, tmp_path, double):
    """The quantized base has one curve on 1 and 2 processes, close to the curve of the plain base."""
    overrides = ["model.quantization=nf4", f"model.double_quantization={double}", "export.merge=true"]
    alone = train(tmp_path / "alone", *common, *overrides)
    variants = {"quantized": overrides}
    run_processes(RUN_VARIANTS, 2, "lora_finetune", str(tmp_path), json.dumps(common), json.dumps(variants))
    assert losses(tmp_path / "quantized") == pytest.approx(alone, rel=1e-5)
    require_merged(tmp_path / "quantized", checkpoint)
    plain = train(tmp_path / "plain", *common)
    assert alone == pytest.approx(plain, rel=0.05) and alone != plain

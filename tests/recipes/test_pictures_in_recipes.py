"""The recipes train models of images and text as they are."""

import json
from pathlib import Path

import full_finetune
import lora_finetune
import pytest
import torch
import transformers
import vision
from helpers import run_processes
from safetensors import safe_open

from tune import collators, datasets, peft, tokenizers


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    """A folder with a model, and rows of which most have pictures."""
    folder = tmp_path_factory.mktemp("pictured")
    vision.save("qwen2_5_vl", folder / "model")
    lines = []
    for number in range(8):
        vision.picture(number, width=60 + 40 * (number % 2)).save(folder / f"{number}.png")
        shown = [{"type": "image", "image": f"{number}.png"}] * (number % 3)  # every third row has none
        question = {"role": "user", "content": [*shown, {"type": "text", "text": "What is in this image?"}]}
        answer = {"role": "assistant", "content": f"the {['red', 'blue'][number % 2]} cat"}
        lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    return folder


def settings(folder, out, *more):
    return [
        f"model.path={folder / 'model'}", f"dataset.path={folder / 'rows.jsonl'}", "dataset.workers=1", "device=cpu",
        "compute.dtype=fp32", "global_batch_size=4", "micro_batch_size=2", "max_steps=3", "epochs=10",
        "optimizer.lr=1e-2", "schedule.warmup=0", f"output_dir={out}", *more,
    ]  # fmt: skip


def losses_in(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_one_curve_and_an_export_that_transformers_opens(pictured, tmp_path, run_recipe):
    assert run_recipe(settings(pictured, tmp_path / "one")) == 0
    one = losses_in(tmp_path / "one")
    assert run_recipe(settings(pictured, tmp_path / "packed", "packed=true", "max_seq_len=512", "max_steps=1")) == 0
    run_processes(Path(full_finetune.__file__), 2, *settings(pictured, tmp_path / "two"))
    assert losses_in(tmp_path / "two") == pytest.approx(one, rel=1e-6) and one[0] > one[2]

    trained = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "one" / "model").eval()
    tokenizer = tokenizers.Tokenizer(tmp_path / "one" / "model")
    data = datasets.load(tokenizer, str(pictured / "rows.jsonl"), max_seq_len=512, workers=1)
    sample = data.row(2)  # with two pictures
    batch = collators.collate([sample], pictures=data.pictures)
    assert batch.pictures.count == 2
    model = peft.open_model(str(tmp_path / "one" / "model")).load(dtype=torch.float32)
    with torch.no_grad():
        kinds = (batch.tokens == trained.config.image_token_id).long()
        theirs = trained(input_ids=batch.tokens, mm_token_type_ids=kinds, **batch.pictures.values).logits
        ours = model(batch)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_adapters_train_the_language_part(pictured, tmp_path, run_recipe):
    assert run_recipe(settings(pictured, tmp_path / "run"), lora_finetune) == 0
    losses = losses_in(tmp_path / "run")
    assert losses[0] > losses[2]
    with safe_open(tmp_path / "run" / "adapter" / "adapter_model.safetensors", "pt") as adapter:
        names = [*adapter.keys()]
    assert names and all("language_model" in name for name in names)

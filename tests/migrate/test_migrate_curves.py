"""A TRL config and its migrated version have the same loss curve."""

import json
import runpy

import pytest
import yaml

from tune import config
from tune.cli import main

CONFIG = """
learning_rate: 1.0e-3
num_train_epochs: 4
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
weight_decay: 0.1
max_length: 64
bf16: false
use_cpu: true
gradient_checkpointing: false
logging_steps: 1
report_to: none
save_strategy: "no"
"""


CASES = [
    *({"lr_scheduler_type": schedule} for schedule in ("linear", "cosine", "constant")),
    {"lr_scheduler_type": "cosine", "max_grad_norm": 0.1, "adam_beta2": 0.9},
    {"completion_only_loss": False, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2, "gradient_checkpointing": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES, ids=lambda changes: ", ".join(f"{k}={v}" for k, v in changes.items()))
def test_loss_curves_match(changes, checkpoint, tmp_path, capsys):
    """Warmup differs, and `tune migrate` reports it."""
    trl = pytest.importorskip("trl", reason="compares with TRL, which is installed by hand")
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [{"prompt": f"the cat {'sat ' * n}", "completion": f"on the mat {'and ran ' * (n % 3)}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    theirs = yaml.safe_load(CONFIG) | changes | {"output_dir": str(tmp_path / "theirs")}
    file = {"model_name_or_path": str(checkpoint), "dataset_name": str(tmp_path / "rows.jsonl"), **theirs}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    main(["migrate", str(tmp_path / "theirs.yaml"), "--method", "sft", "--out", str(tmp_path / "ours.yaml")])

    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(checkpoint),
        args=trl.SFTConfig(**theirs),
        train_dataset=datasets.Dataset.from_list(rows),  # all 8 rows are one batch: their order does not matter
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
    )
    trainer.train()
    expected = [line["loss"] for line in trainer.state.log_history if "loss" in line]

    settings = ["--config", str(tmp_path / "ours.yaml"), f"output_dir={tmp_path / 'ours'}"]
    cfg = config.load("full_finetune", settings)
    runpy.run_path(str(config.find_recipe("full_finetune")))["main"](cfg)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()]
    if changes.get("warmup_steps"):
        assert "schedule.warmup=2  (" in capsys.readouterr().out
        assert expected[1] == pytest.approx(expected[0]) and losses[1] < expected[1] - 0.1
        return
    assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0] - 0.1

"""General data measures the changes of training; the references are transformers models before and after it."""

import json
import shutil
from pathlib import Path

import full_finetune
import lora_finetune
import numpy as np
import pytest
import torch
from edited_recipes import run_edited
from helpers import make_adapter, run_processes, slow_but

from tune import config
from tune.cli import validate
from tune.errors import TuneError
from tune.evaluation.general import SHIPPED, K
from tune.tokenizers import Tokenizer

VARIANTS = Path(__file__).parents[1] / "recipes" / "run_variants.py"


@pytest.fixture
def rows(tmp_path):
    texts = ["the cat sat on the mat and ran", "a very big dog was red", "it ran under the blue rug; then it sat"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def common(checkpoint, chats, rows):
    return [
        f"model.path={checkpoint}", f"dataset.path={chats}", "device=cpu", "compute.dtype=fp32", "max_seq_len=128",
        "global_batch_size=4", "max_steps=3", "optimizer.lr=0.01", f"evaluate.general={rows}",
    ]  # fmt: skip


def logged(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


@torch.no_grad()
def measured(base, trained, rows, tokenizer):
    """The fp64 loss of `trained` and its KL to the base over the K most probable tokens and a bucket of the others."""
    losses, divergences = [], []
    for row in map(json.loads, rows.read_text().splitlines()):
        ids = torch.tensor([[*tokenizer.prefix_ids, *tokenizer.encode(row["text"]), tokenizer.eos_id]])
        before, after = (model(ids).logits[0, :-1].double().log_softmax(-1) for model in (base, trained))
        losses += (-after.gather(1, ids[0, 1:, None])[:, 0]).tolist()
        most, places = before.topk(K)
        theirs = after.gather(1, places)
        parts = [torch.cat([top, (1 - top.exp().sum(1, True)).log()], 1) for top in (most, theirs)]
        divergences += (parts[0].exp() * (parts[0] - parts[1])).sum(1).tolist()
    return np.mean(losses), np.mean(divergences)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [full_finetune, lora_finetune])
def test_loss_and_kl_to_the_base_are_reported(recipe, common, checkpoint, rows, tmp_path):
    run, name = tmp_path / "run", recipe.__name__
    settings = [f"output_dir={run}", "evaluate.every=2", "evaluate.general_limit=0.01"]
    settings += ["export.merge=true"] if recipe is lora_finetune else []
    recipe.main(config.load(name, [*common, *settings]))
    steps, tokenizer = logged(run), Tokenizer(str(checkpoint))
    open_theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    base, trained = (open_theirs(path, dtype=torch.float32).eval() for path in (checkpoint, run / "model"))
    loss, kl = measured(base, base, rows, tokenizer)
    assert steps[0]["general_loss"] == pytest.approx(loss, abs=1e-5)
    assert steps[0]["general_kl"] == pytest.approx(0, abs=1e-6) and kl == 0
    loss, kl = measured(base, trained, rows, tokenizer)
    assert steps[3]["general_loss"] == pytest.approx(loss, abs=1e-5)
    assert steps[3]["general_kl"] == pytest.approx(kl, abs=1e-5) and kl > 0.01
    assert "general_kl" in steps[2] and "general_kl" not in steps[1]
    log = (run / "log.txt").read_text()
    assert [line for line in log.splitlines() if line.startswith("warning: step 3") and "general_kl" in line]
    report = (run / "report.html").read_text()
    assert "general_kl" in report and "evaluate.general_limit=0.01" in report


@pytest.mark.slow
def test_resumed_run_compares_with_the_same_base(common, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = [*common, "checkpointer.every=1", "evaluate.general_limit=1e-9"]
    full_finetune.main(config.load("full_finetune", [*common, f"output_dir={whole}"]))
    first = [*common, f"output_dir={parts}", "max_steps=2", "schedule._component_=tune.optimizers.constant"]
    full_finetune.main(config.load("full_finetune", first))
    full_finetune.main(config.load("full_finetune", [*first, "max_steps=3"]))
    assert logged(parts)[3]["general_kl"] > logged(parts)[2]["general_kl"] > 1e-3
    kept = next((parts / "general").glob("base-*.npy"))
    (other,) = (whole / "general").glob("base-*.npy")
    assert np.array_equal(np.load(kept), np.load(other))  # predictions of the model before the first step
    kept.unlink()
    with pytest.raises((TuneError, SystemExit)):
        full_finetune.main(config.load("full_finetune", [*first, "max_steps=4"]))
    assert "evaluate.general" in capsys.readouterr().err + (parts / "log.txt").read_text()


@pytest.mark.slow
def test_start_over_computes_the_base_again(common, checkpoint, tied_checkpoint, tmp_path):
    """The folder may have predictions of another model, of a start without a checkpoint."""
    same = [*common, "max_steps=1", f"output_dir={tmp_path / 'run'}"]
    full_finetune.main(config.load("full_finetune", [*same, f"model.path={tied_checkpoint}"]))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    full_finetune.main(config.load("full_finetune", [*same, f"model.path={checkpoint}"]))
    assert logged(tmp_path / "run")[0]["general_kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["set later", "other rows"])
def test_missing_predictions_of_the_base_are_reported_before_a_step(case, common, rows, told, tmp_path, monkeypatch):
    """RUN/general may have files, but of other rows. All rows are read, also if a rehearsal reads few."""
    monkeypatch.setattr(validate, "ROWS", 2)
    run = tmp_path / "run"
    without, general = common[:-1], common[-1]
    before = {"set later": without, "other rows": [*without, "evaluate.general=shipped"]}[case]
    first = ["max_steps=1", "schedule._component_=tune.optimizers.constant", "checkpointer.every=1"]
    full_finetune.main(config.load("full_finetune", [*before, *first, f"output_dir={run}"]))
    more = [*without, general, *first, "max_steps=3", f"output_dir={run}"]
    assert "evaluate.general" in told("full_finetune", more)
    if case == "other rows":
        assert "evaluate.general" not in told("full_finetune", [*before, *more[len(common) :]])
    with pytest.raises((TuneError, SystemExit)):
        full_finetune.main(config.load("full_finetune", more))
    assert max(logged(run)) == 1


@pytest.mark.slow
def test_predictions_come_from_the_run_that_training_continues_from(common, checkpoint, tmp_path):
    """Another training has left predictions for the same rows in the new folder."""
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    settings = [*common, "schedule._component_=tune.optimizers.constant", "checkpointer.every=1"]
    full_finetune.main(config.load("full_finetune", [*settings, "max_steps=2", f"output_dir={first}"]))
    theirs = ["edit=random", "max_steps=1", f"output_dir={other}"]
    run_edited("full_finetune", [*settings, *theirs])
    shutil.copytree(other / "general", again / "general")
    resumed = [*settings, f"resume={first}", f"output_dir={again}"]
    full_finetune.main(config.load("full_finetune", resumed))
    whole = tmp_path / "whole"
    full_finetune.main(config.load("full_finetune", [*settings, f"output_dir={whole}"]))
    assert logged(again)[3]["general_kl"] == logged(whole)[3]["general_kl"] > 1e-3
    kept = next((first / "general").glob("base-*.npy"))
    assert (again / "general" / kept.name).read_bytes() == kept.read_bytes()


@pytest.mark.slow
def test_damaged_predictions_are_not_computed_by_the_trained_model(common, tmp_path, capsys):
    run = tmp_path / "run"
    settings = [*common, "schedule._component_=tune.optimizers.constant", "checkpointer.every=1", f"output_dir={run}"]
    full_finetune.main(config.load("full_finetune", [*settings, "max_steps=2"]))
    kept = next((run / "general").glob("base-*.npy"))
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    with pytest.raises((TuneError, SystemExit)):
        full_finetune.main(config.load("full_finetune", settings))
    assert max(logged(run)) == 2


TOKENS = "adapter.trainable_tokens=[5,6,7,40,41]"


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["adapter"], ["adapter", "tokens", "continued"]))
def test_base_is_the_model_without_its_adapter(kind, common, checkpoint, rows, tmp_path):
    """Also after a resume with other general data, when the adapter is trained; the reference is transformers."""
    settings = [TOKENS] if kind == "tokens" else []
    if kind == "continued":
        settings = [f"adapter.path={make_adapter(checkpoint, tmp_path / 'adapter', seed=3)}"]
    run, without = tmp_path / "run", common[:-1]
    constant = "schedule._component_=tune.optimizers.constant"
    same = [*without, *settings, constant, "checkpointer.every=1", "optimizer.lr=0.1", f"output_dir={run}"]
    same += ["export.merge=true"]
    lora_finetune.main(config.load("lora_finetune", [*same, "max_steps=2", "evaluate.general=shipped"]))
    shipped = logged(run)
    if kind == "continued":
        assert shipped[0]["general_kl"] > 1e-3  # before the first step, too
    lora_finetune.main(config.load("lora_finetune", [*same, common[-1]]))
    open_theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    base, trained = (open_theirs(path, dtype=torch.float32).eval() for path in (checkpoint, run / "model"))
    loss, kl = measured(base, trained, rows, Tokenizer(str(checkpoint)))
    assert logged(run)[3]["general_kl"] == pytest.approx(kl, abs=1e-5) and kl > 1e-3
    assert logged(run)[3]["general_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.slow
def test_base_with_modules_that_are_trained_in_full(common, checkpoint, rows, told, tmp_path):
    """Predictions that were stored before the first step count; else the run is refused: the head was trained."""
    run, without = tmp_path / "run", common[:-1]
    same = [
        *without, "adapter.modules_to_save=[lm_head]", "schedule._component_=tune.optimizers.constant",
        "checkpointer.every=1", "optimizer.lr=0.1", f"output_dir={run}", "export.merge=true",
    ]  # fmt: skip
    lora_finetune.main(config.load("lora_finetune", [*same, common[-1], "max_steps=2"]))
    other = [*same, "evaluate.general=shipped"]
    assert "head.weight" in told("lora_finetune", other)
    with pytest.raises((TuneError, SystemExit)):
        lora_finetune.main(config.load("lora_finetune", other))
    assert max(logged(run)) == 2
    lora_finetune.main(config.load("lora_finetune", [*same, common[-1]]))
    open_theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    base, trained = (open_theirs(path, dtype=torch.float32).eval() for path in (checkpoint, run / "model"))
    _, kl = measured(base, trained, rows, Tokenizer(str(checkpoint)))
    assert logged(run)[3]["general_kl"] == pytest.approx(kl, abs=1e-5) and kl > 1e-3


@pytest.mark.slow
def test_continued_adapter_with_whole_modules_has_no_base(common, checkpoint, told, tmp_path):
    adapter = make_adapter(checkpoint, tmp_path / "adapter", seed=3, modules_to_save=["lm_head"])
    settings = [*common, f"adapter.path={adapter}"]
    assert "evaluate.general" in told("lora_finetune", settings)
    assert "evaluate.general" not in told("lora_finetune", settings[:-2] + settings[-1:])


@pytest.mark.slow
def test_general_data_is_measured_with_each_validation(common, chats, tmp_path):
    settings = [f"dataset.validation={{path: {chats}, take: 4}}", "evaluate.every=2"]
    full_finetune.main(config.load("full_finetune", [*common, *settings, f"output_dir={tmp_path / 'run'}"]))
    steps = logged(tmp_path / "run")
    with_loss = {step for step, line in steps.items() if "validation_loss" in line}
    assert with_loss == {2, 3} and {step for step, line in steps.items() if "general_kl" in line} == {0, 2, 3}


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_layouts_give_the_same_general_metrics(recipe, common, tmp_path):
    """The metrics do not depend on the number of processes or on how they shard the model."""
    layouts = {
        "sharded": [], "heads": ["parallel.tp=2"], "tokens": ["parallel.cp=2"], "copies": ["parallel.zero_stage=1"],
        "packed": ["packed=true", "micro_batch_size=2", "global_batch_size=4"],
    }  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    common = [*common, "evaluate.every=1"]
    alone = {"alone": [], "packed": layouts["packed"]}
    run_processes(VARIANTS, 1, recipe, str(one), json.dumps(common), json.dumps(alone))
    run_processes(VARIANTS, 2, recipe, str(two), json.dumps(common), json.dumps(layouts))
    for name in layouts:
        expected = logged(one / ("packed" if name == "packed" else "alone"))
        steps = logged(two / name)
        for step in range(4):
            for metric in ("general_loss", "general_kl"):
                assert steps[step][metric] == pytest.approx(expected[step][metric], abs=2e-5), (name, step)


@pytest.mark.slow
def test_two_processes_measure_the_same_as_one(common, tmp_path):
    common = [*common, "max_steps=1"]
    full_finetune.main(config.load("full_finetune", [*common, f"output_dir={tmp_path / 'one'}"]))
    run_processes(VARIANTS, 2, "full_finetune", str(tmp_path), json.dumps(common), '{"two": []}')
    one, two = (logged(tmp_path / name) for name in ("one", "two"))
    for step, metric in [(step, metric) for step in (0, 1) for metric in ("general_loss", "general_kl")]:
        assert two[step][metric] == pytest.approx(one[step][metric], abs=1e-6)


@pytest.mark.slow
def test_shipped_rows(common, tmp_path):
    settings = [*common, "evaluate.general=shipped", "max_steps=1", f"output_dir={tmp_path / 'run'}"]
    full_finetune.main(config.load("full_finetune", settings))
    assert logged(tmp_path / "run")[1]["general_kl"] > 0
    texts = [json.loads(line)["text"] for line in SHIPPED.read_text().splitlines()]
    assert len({*texts}) == len(texts) >= 20


WRONG = {
    "no file": (["evaluate.general=none.jsonl"], "none.jsonl"),
    "other rows": (["evaluate.general=odd.jsonl"], "odd.jsonl:1"),
    "limit": (["evaluate.general=shipped", "evaluate.general_limit=0"], "general_limit: 0 is not"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_invalid_inputs_are_refused(name, common, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.jsonl").write_text('{"odd": 1}\n')
    settings, message = WRONG[name]
    output = told("full_finetune", [*common, *settings])
    assert message in output and "evaluate.general" in output

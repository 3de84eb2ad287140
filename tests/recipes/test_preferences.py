"""Preference tuning end to end: the first loss, trained weights, references, one curve in every layout."""

import json
import shutil
from math import log
from pathlib import Path

import preference_finetune
import pytest
import torch
from helpers import run_processes, save_checkpoint, slow_but, weekly_but
from safetensors.torch import load_file

from tune.cli import main as tune
from tune.generation import Sampler
from tune.peft import open_model

LOSSES = ["DPO", "IPO", "SimPO", "CPO", "ORPO", "KTO"]


def loss(name):
    """Return the settings of a built-in loss."""
    return [f"loss._component_=tune.losses.{name}", *(["dataset.kind=labelled"] if name == "KTO" else [])]


RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
MIXED = "tune.datasets.mix"
NO_REFERENCE = ("SimPO", "CPO", "ORPO")


@pytest.fixture
def settings(checkpoint, pairs, tmp_path):
    return [
        f"model.path={checkpoint}", f"dataset.path={pairs}", f"output_dir={tmp_path / 'run'}", "max_seq_len=256",
        "device=cpu", "compute.dtype=fp32", "global_batch_size=40", "epochs=3", "optimizer.lr=1e-3",
        "schedule.warmup=0",
    ]  # fmt: skip


@pytest.fixture
def run(run_recipe, settings, tmp_path):
    def run(*overrides, folder=tmp_path / "run"):
        base_settings = [
            setting for setting in settings if not (setting.startswith("dataset.path") and MIXED in "".join(overrides))
        ]
        assert run_recipe([*base_settings, f"output_dir={folder}", *overrides], preference_finetune) == 0
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return run


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains_and_raises_the_reward_margin(name, run, checkpoint, tmp_path):
    steps = run(*loss(name))
    first, last = steps[0], steps[-1]
    if name == "DPO":
        assert first["loss"] == pytest.approx(log(2), abs=1e-6)
        assert first["rewards/margins"] == 0
    if name not in NO_REFERENCE:
        assert first["rewards/chosen"] == first["rewards/rejected"] == 0
    assert last["rewards/chosen"] - last["rewards/rejected"] > first["rewards/chosen"] - first["rewards/rejected"]
    assert last["loss"] < first["loss"]
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "run" / "model"))
    assert all(not torch.equal(after[key], before[key]) for key in before)


@pytest.mark.slow
def test_reference_is_freed_before_the_first_step(run, tied_checkpoint, frozen_in_steps):
    run(f"reference={tied_checkpoint}", "max_steps=1")
    assert frozen_in_steps == [False]


LORA = ["adapter.rank=4", "adapter.dropout=0"]


def losses(steps):
    return [step["loss"] for step in steps]


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("name", weekly_but(["DPO"], ["DPO", "KTO"]))
def test_answers_to_fixed_prompts(name, run, checkpoint, tmp_path):
    """They come before the first step, after every second step and the last. Training is unchanged."""
    (tmp_path / "prompts.txt").write_text("the cat\nit was\n")
    asked = [f"evaluate.prompts={tmp_path}/prompts.txt", "evaluate.max_new_tokens=7", "evaluate.every=2"]
    common = [*loss(name), *LORA, "max_steps=3", "optimizer.lr=0.05"]
    assert losses(run(*common, *asked)) == losses(run(*common, folder=tmp_path / "plain"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["index"]) for row in rows] == [(at, index) for at in (0, 2, 3) for index in range(2)]
    for answers, adapter in ((rows[:2], []), (rows[4:], [tmp_path / "run" / "adapter"])):
        opened = open_model(checkpoint, adapters=adapter)
        model, tokenizer = opened.load(), opened.tokenizer()
        chats = [[{"role": "user", "content": row["prompt"]}] for row in answers]
        prompts = [tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True)) for chat in chats]
        expected = Sampler(max_new_tokens=7, temperature=0, stop_ids=tokenizer.stop_ids)(model, prompts)
        assert [row["tokens"] for row in answers] == [completion.tokens for (completion,) in expected]
    assert [row["tokens"] for row in rows[:2]] != [row["tokens"] for row in rows[4:]]


def references(folder):
    """Return the files with log-probs of a reference, and when each was written."""
    return {file: file.stat().st_mtime_ns for file in folder.glob("reference-*.npy")}


@pytest.mark.weekly
@pytest.mark.parametrize("name", weekly_but(["DPO"], ["DPO", "KTO"]))
def test_references_agree(name, run, checkpoint, tmp_path):
    curves = {
        reference: losses(run(*loss(name), *LORA, f"reference={reference}", folder=tmp_path / str(number)))
        for number, reference in enumerate(("precomputed", "adapter_off", str(checkpoint)))
    }
    precomputed, *others = curves.values()
    assert len(precomputed) == 3 and precomputed[-1] < precomputed[0] - 1e-4
    assert others == [pytest.approx(precomputed, rel=1e-5)] * 2


@pytest.mark.slow
def test_another_model_as_the_reference(run, tied_checkpoint, checkpoint, tmp_path):
    """The rewards compare the policy with that model's log-probs."""
    (step, *_) = run(f"reference={tied_checkpoint}", "epochs=1")
    assert abs(step["loss"] - log(2)) > 1e-3
    ratio = step["rewards/chosen"] / 0.1
    (own, *_) = run(f"model.path={tied_checkpoint}", "epochs=1", folder=tmp_path / "other")
    assert step["logps/chosen"] - own["logps/chosen"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.weekly
def test_continued_adapter_is_part_of_the_reference(run, tmp_path):
    run(*LORA, folder=tmp_path / "first")
    adapter = f"adapter={{_component_: tune.peft.adapter, path: {tmp_path / 'first' / 'adapter'}}}"
    (step, *_) = run(adapter, folder=tmp_path / "second")
    assert step["loss"] == pytest.approx(log(2), abs=1e-6) and step["rewards/margins"] == 0


@pytest.mark.slow
def test_reference_has_no_dropout(run, pairs, tmp_path):
    """The reference of a continued adapter is the policy without dropout, before the first step."""
    run(*LORA, "epochs=1", folder=tmp_path / "first")
    adapter = f"adapter={{_component_: tune.peft.adapter, path: {tmp_path / 'first' / 'adapter'}, dropout: 0.5}}"
    validated = [f"dataset.validation={pairs}", "evaluate.first=true"]
    before, first, *_ = run(adapter, *validated, "epochs=1", folder=tmp_path / "second")
    assert before["validation_loss"] == pytest.approx(log(2), abs=1e-6) and before["validation_rewards/margins"] == 0
    assert abs(first["rewards/margins"]) > 1e-6  # the policy has dropout in training


@pytest.mark.weekly
def test_resumed_run_keeps_the_reference_of_the_starting_model(run, tmp_path):
    constant = ["schedule._component_=tune.optimizers.constant", "epochs=4"]
    whole = losses(run(*constant, folder=tmp_path / "whole"))
    folder = tmp_path / "run"
    run(*constant, "max_steps=1")
    (written,) = references(folder).items()
    run(*constant, "max_steps=2")
    assert references(folder) == dict([written])  # read, not computed again
    written[0].unlink()
    assert losses(run(*constant)) == whole
    assert [*references(folder)] == [written[0]]


@pytest.mark.weekly
def test_other_data_or_weights_have_their_own_reference(run, pairs, tied_checkpoint, tmp_path):
    """This holds in the folder of an earlier run, too."""
    folder = tmp_path / "run"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(pairs.read_text().splitlines(keepends=True)[4:]))
    counts = []
    for changed in ([], [f"dataset.path={other}"], [f"model.path={tied_checkpoint}"]):
        steps = run(*changed, "epochs=1")
        assert steps[-1]["loss"] == pytest.approx(log(2), abs=1e-6)
        counts.append(len(references(folder)))
        for part in ("checkpoints", "model"):
            shutil.rmtree(folder / part)
    assert counts == [1, 2, 3]


WAYS = {
    "micro-batches of 1": ["micro_batch_size=1"],
    "micro-batches of 2": ["micro_batch_size=2"],
    "micro-batches of 8": ["micro_batch_size=8"],
    "packed": ["packed=true", "micro_batch_size=2"],
    "packed, micro-batches of 1": ["packed=true"],
    "recomputed": ["compute.activation_checkpointing=full", "micro_batch_size=8"],
    "small chunks": ["loss_chunk_tokens=3", "micro_batch_size=8"],
}
METHODS = {
    "DPO": [],
    "KTO": [*loss("KTO"), "loss.undesirable=0.7"],
    "ORPO": ["loss._component_=tune.losses.ORPO"],
    "DPO without the adapter": ["adapter={_component_: tune.peft.adapter, rank: 4}", "reference=adapter_off"],
}
# Metrics that do not depend on the way. The gradient norm sums more rounding errors than the others.
FIGURES = ("loss", "grad_norm", "entropy", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected", "kl")


def assert_one_curve(steps, plain):
    assert len(steps) == len(plain) == 3
    for one, other in zip(steps, plain, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        for name in FIGURES:
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-4, abs=1e-5), name


@pytest.mark.weekly
@pytest.mark.parametrize("method", weekly_but(["DPO"], METHODS))
def test_curve_does_not_depend_on_micro_batches(method, run, tmp_path):
    curves = {way: run(*METHODS[method], *WAYS[way], folder=tmp_path / way) for way in WAYS}
    plain = curves["micro-batches of 1"]
    assert plain[-1]["loss"] < plain[0]["loss"] - 1e-3
    for curve in curves.values():
        assert_one_curve(curve, plain)


@pytest.mark.weekly
def test_one_curve_on_two_processes(run, settings, pairs, tmp_path):
    ways = {
        "micro-batches of 1": ["micro_batch_size=1"],
        "two copies of the model": ["micro_batch_size=4", "parallel.dp_replicate=2"],
        "heads shared": ["micro_batch_size=2", "parallel.tp=2"],
        "tokens shared": ["micro_batch_size=2", "parallel.cp=2"],
        "packed": ["packed=true"],
        "gradients reduced once": ["micro_batch_size=2", "parallel.reduce_every_micro_batch=false"],
    }
    layouts = {method: ways if method == "DPO" else ["heads shared"] for method in METHODS}
    variants = {f"{method} {way}": [*METHODS[method], *ways[way]] for method in METHODS for way in layouts[method]}
    common = [*settings, f"dataset.validation={pairs}"]
    run_processes(RUN_VARIANTS, 2, "preference_finetune", str(tmp_path), json.dumps(common), json.dumps(variants))
    for method in METHODS:
        plain = run(*METHODS[method], f"dataset.validation={pairs}", folder=tmp_path / "alone" / method)
        for way in layouts[method]:
            lines = (tmp_path / f"{method} {way}" / "metrics.jsonl").read_text().splitlines()
            curve = [json.loads(line) for line in lines]
            assert_one_curve(curve, plain)
            assert curve[-1]["validation_loss"] == pytest.approx(plain[-1]["validation_loss"], rel=1e-5)


@pytest.mark.slow
def test_validation(run, pairs, tmp_path):
    """Validation on the training rows before the first step matches the first step."""
    for method in ("DPO", "KTO"):
        steps = run(
            *METHODS[method], f"dataset.validation={pairs}", "evaluate.first=true", "micro_batch_size=4",
            folder=tmp_path / method,
        )  # fmt: skip
        before, first, *_, last = steps
        names = [name for name in FIGURES if name in first and name != "grad_norm"]
        assert len(names) == (7 if method == "KTO" else 6)
        for name in names:
            assert before[f"validation_{name}"] == pytest.approx(first[name], rel=1e-5, abs=1e-6), name
        assert last["validation_loss"] < before["validation_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["DPO"], ["DPO", "KTO"]))
def test_rows_held_out_and_mixtures(method, run, pairs, tmp_path):
    steps = run(*METHODS[method], "dataset.validation_fraction=0.3", "epochs=1", "micro_batch_size=4")
    assert {"validation_loss", "validation_rewards/chosen", "validation_logps/chosen"} <= steps[-1].keys()
    lines = pairs.read_text().splitlines(keepends=True)
    files = {"few": tmp_path / "few.jsonl", "many": tmp_path / "many.jsonl"}
    files["few"].write_text("".join(lines[:4]))
    files["many"].write_text("".join(lines[4:]))
    each = (f"{name}: {{path: {file}, validation: {file}, weight: 1}}" for name, file in files.items())
    mixed = [f"dataset._component_={MIXED}", f"dataset.sources={{{', '.join(each)}}}"]
    folder = tmp_path / "mixed"
    steps = run(*METHODS[method], *mixed, "epochs=1", "evaluate.first=true", folder=folder)
    if method == "DPO":
        first = [steps[0]["validation_loss/few"], steps[0]["validation_loss"], steps[1]["loss"]]
        assert first == pytest.approx([log(2)] * 3, abs=1e-6)
    assert steps[-1]["validation_loss/few"] != steps[-1]["validation_loss/many"]
    assert len(references(folder)) == 2  # one per source, although each is also used for validation


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["precomputed", "adapter_off"])
def test_adapters_on_a_quantized_base(reference, run, tmp_path):
    steps = run(*LORA, "model.quantization=nf4", f"reference={reference}", "micro_batch_size=4")
    assert steps[0]["loss"] == pytest.approx(log(2), abs=1e-6)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1e-4
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("settings_of", ["all", "experts"])
def test_mixtures_of_experts(settings_of, run, tmp_path):
    experts = save_checkpoint(
        tmp_path / "model", "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, head_dim=16,
        moe_intermediate_size=32, num_hidden_layers=2,
    )  # fmt: skip
    trained = ["adapter={_component_: tune.peft.adapter, target_modules: '.*(q_proj|experts.*)'}"]
    settings = [f"model.path={experts}", *(trained if settings_of == "experts" else []), "micro_batch_size=4"]
    plain = run(*settings, folder=tmp_path / "plain")
    assert plain[0]["loss"] == pytest.approx(log(2), abs=1e-6)
    assert plain[-1]["loss"] < plain[0]["loss"]
    if settings_of == "experts":
        off = run(*settings, "reference=adapter_off", folder=tmp_path / "off")
        assert_one_curve(off, plain)
        for one, other in zip(off, plain, strict=True):  # from the policy alone
            assert one["expert_load"] == pytest.approx(other["expert_load"], rel=1e-5)


def by_hand(name, checkpoint, rows, steps=3):
    """Yield loss, gradient norm and rewards of each step, from transformers and the formulas. A step has all rows."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model, frozen = (transformers.AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    rows = [row for row in rows if row["chosen"] not in row["rejected"]]

    def log_prob(model, row, answer, reduction="sum"):
        prompt = f"<|im_start|>user\n{row['instruction']}<|im_end|>\n<|im_start|>assistant\n"
        start, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer + "<|im_end|>")
        )
        log_p = model(torch.tensor([start + answer])).logits[0, len(start) - 1 : -1].log_softmax(-1)
        if model is not frozen:
            entropies.append(-(log_p.exp() * log_p).sum(-1).detach())
        return getattr(log_p.gather(1, torch.tensor(answer)[:, None]), reduction)()

    def ratio(row, answer):
        with torch.no_grad():
            reference = log_prob(frozen, row, answer)
        return log_prob(model, row, answer) - reference

    for _ in range(steps):
        entropies = []
        good = [ratio(row, row["chosen"]) for row in rows]
        bad = [[ratio(row, answer) for answer in row["rejected"]] for row in rows]
        if name == "DPO":
            margins = [0.1 * (one - other) for one, others in zip(good, bad, strict=True) for other in others]
            loss = torch.stack([-torch.nn.functional.logsigmoid(margin) for margin in margins]).mean()
            figures = {"rewards/margins": torch.stack(margins).mean().item()}
            figures |= {"entropy": torch.cat(entropies).mean().item(), "supervised_tokens": len(torch.cat(entropies))}
        elif name == "SimPO":  # means over the answer's tokens, not the prompt's
            better = [log_prob(model, row, row["chosen"], "mean") for row in rows]
            worse = [[log_prob(model, row, answer, "mean") for answer in row["rejected"]] for row in rows]
            margins = [2 * (one - other) for one, others in zip(better, worse, strict=True) for other in others]
            loss = torch.stack([-torch.nn.functional.logsigmoid(margin - 1) for margin in margins]).mean()
            figures = {"rewards/margins": torch.stack(margins).mean().item()}
        else:
            bad = [other for others in bad for other in others]
            following = [*rows[1:], rows[0]]
            with torch.no_grad():
                ratios = [ratio(row, other["chosen"]) for row, other in zip(rows, following, strict=True)]
                times = [1 + len(row["rejected"]) for row in rows]
                z = max(0, sum(a * b for a, b in zip(ratios, times, strict=True)) / sum(times))
            losses = [1 - torch.sigmoid(0.1 * (r - z)) for r in good] + [1 - torch.sigmoid(0.1 * (z - r)) for r in bad]
            loss = torch.stack(losses).mean()
            figures = {"kl": float(z), "rewards/rejected": 0.1 * torch.stack(bad).mean().item()}
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield {"loss": loss.item(), "grad_norm": norm.item(), **figures}
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["DPO", "SimPO"], ["DPO", "SimPO", "KTO"]))
def test_steps_match_a_transformers_loop(name, run, checkpoint, pairs):
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    constant = "schedule._component_=tune.optimizers.constant"
    steps = run(*loss(name), constant, "micro_batch_size=4")
    for ours, theirs in zip(steps, by_hand(name, checkpoint, rows), strict=True):
        assert {metric: ours[metric] for metric in theirs} == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["tokens"] > ours["supervised_tokens"]


@pytest.mark.slow
def test_commands(checkpoint, pairs, run_recipe, tmp_path, capsys):
    """Preview and prepare read pairs and labeled answers; a copy of the recipe runs, too."""
    data = [f"model.path={checkpoint}", f"dataset.path={pairs}", "max_seq_len=128"]
    first = json.loads(pairs.read_text().splitlines()[0])
    tune(["preview", "preference_finetune", *data])
    shown = capsys.readouterr().out
    assert all(f"⟦{answer}<|im_end|>⟧" in shown for answer in (first["chosen"], first["rejected"][0]))
    tune(["prepare", "preference_finetune", *data, *loss("KTO")])
    assert "instruction_preference" in capsys.readouterr().out
    tune(["cp", "preference_finetune", str(tmp_path / "mine.py")])
    tune(["run", str(tmp_path / "mine.py"), *data, "device=cpu", "max_steps=1", f"output_dir={tmp_path / 'run'}"])
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()

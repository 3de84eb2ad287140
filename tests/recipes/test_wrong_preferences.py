"""Wrong settings and rows of preference tuning: each is reported by its key or place, or counted."""

import json
import shutil

import full_finetune
import preference_finetune
import pytest
from helpers import REFUSED_BY, save_checkpoint

KTO = ["loss._component_=tune.losses.KTO", "dataset.kind=labelled"]
SFT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"instruction": "the cat", "chosen": "sat", "rejected": "ran"}
LABELLED = {"prompt": "the cat", "completion": " sat", "label": True}


@pytest.fixture
def settings(checkpoint, pairs, tmp_path):
    return [
        f"model.path={checkpoint}", f"dataset.path={pairs}", f"output_dir={tmp_path / 'run'}", "max_seq_len=256",
        "device=cpu", "compute.dtype=fp32", "global_batch_size=4", "max_steps=1", "checkpointer.every=null",
    ]  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"dataset.path={file}"

    return write


class Unrewarded:
    needs_reference = True

    def __call__(self, chosen, rejected):
        return rejected.ratio - chosen.ratio


class Mean(Unrewarded):
    def __call__(self, chosen, rejected):
        return super().__call__(chosen, rejected).mean()

    def reward(self, answers):
        return answers.ratio


class Broadcast(Mean):
    def __call__(self, chosen, rejected):
        return rejected.ratio - chosen.ratio[:, None]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "shape"), [("Mean", "[]"), ("Broadcast", "[1, 1]")])
def test_loss_that_is_not_one_number_per_pair_is_refused(settings, loss, shape, run_recipe, capsys):
    settings = [*settings, f"loss._component_=recipes.test_wrong_preferences.{loss}"]
    assert run_recipe(settings, preference_finetune) == 2
    error = capsys.readouterr().err
    assert "loss: " in error and f" {shape}" in error


@pytest.mark.parametrize(*REFUSED_BY)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reference=precomputd"], "reference: precomputd is neither precomputed nor adapter_off nor "),
        (["reference=/nowhere"], "reference: /nowhere is neither precomputed nor adapter_off nor "),
        (["reference=adapter_off"], "reference: adapter_off needs an adapter"),
        (
            ["reference=adapter_off", "adapter.modules_to_save=[norm]"],
            "reference: adapter_off needs an adapter that can be switched off: with adapter.modules_to_save",
        ),
        (
            ["reference={checkpoint}/../.", "loss._component_=tune.losses.SimPO"],
            "reference: tune.losses.SimPO uses no reference",
        ),
        (["dataset.streaming=true"], "reference: the rows of {pairs} are streamed"),
        (["dataset.streaming=true", *KTO], "streaming: labelled rows are compared with answers to other prompts"),
        (
            ["loss._component_=tune.losses.LinearCrossEntropy"],
            "loss._component_: tune.losses.LinearCrossEntropy does not compare log-probs of answers, unlike",
        ),
        (
            ["loss._component_=tune.losses.BradleyTerry"],
            "loss._component_: tune.losses.BradleyTerry does not compare log-probs of answers, unlike",
        ),
        (["dataset.kind=labelled"], "loss._component_: tune.losses.DPO needs dataset.kind=preferences (got labelled)"),
        (
            [KTO[0]],
            "loss._component_: tune.losses.KTO needs dataset.kind=labelled (got preferences)",
        ),
        (["loss._component_=recipes.test_wrong_preferences.Unrewarded"], "Unrewarded has no method reward(answers)"),
        (["reference=3"], "reference: 3 is neither precomputed nor"),
        (["model.head=score"], "model.head: 'score' "),
        (["checkpointer.keep_best=rewards/margins"], "checkpointer.keep_best: rewards/margins "),
        (["loss.beta=-1"], "loss.beta: -1 is not a positive number"),
        (["loss._component_=tune.losses.DPOO"], "tune.losses has no 'DPOO'. Did you mean 'DPO'?"),
        (["loss._component_=tune.losses.Dpo"], "loss._component_: tune.losses has no 'Dpo'. Did you mean 'DPO'?"),
        (["loss.beta=0"], "loss.beta: 0 is not a positive number"),
        (["loss.label_smoothing=1"], "loss.label_smoothing: 1 is not a number from 0 to below 1"),
        (["loss.gamma=1"], "loss.gamma: is not a setting"),
        (["model.quantization=nf4"], "model.quantization: quantized weights are frozen"),
        (["dataset.train_on=all"], "preferences rows train on whole answers: remove train_on"),
        (["max_seq_len=24"], "Set max_seq_len to at least 40,"),
    ],
)
def test_wrong_settings(overrides, message, by, settings, checkpoint, pairs, run_recipe, capsys, told, monkeypatch):
    monkeypatch.delattr("tune.checkpointers.Pretrained.load")  # refused before weights are read
    formatted = [override.format(checkpoint=checkpoint) for override in overrides]
    if by == "validate":
        assert message.format(pairs=pairs) in told("preference_finetune", [*settings, *formatted])
        return
    assert run_recipe([*settings, *formatted], preference_finetune) == 2
    assert message.format(pairs=pairs) in capsys.readouterr().err


@pytest.mark.parametrize(*REFUSED_BY)
@pytest.mark.parametrize(
    ("row", "overrides", "message"),
    [
        (LABELLED, [], "the columns prompt, completion, label match no known format: instruction + chosen"),
        (SFT, [], "the columns messages match no known format: instruction + chosen + rejected"),
        ({**PAIR, "rejected": []}, [], "none of the 4 rows can be used: empty rejected (4)"),
        ({**PAIR, "rejected": "sat"}, [], "none of the 4 rows can be used: chosen equal to rejected (4)"),
        ({"instruction": "a", "chosen": "b"}, [], "the columns instruction, chosen match no known format"),
        ({**LABELLED, "label": "good"}, KTO, 'label is "good"; it must be true (a good answer) or false'),
        (PAIR, ["max_seq_len=25"], "Set max_seq_len to at least 40,"),
    ],
)
def test_wrong_rows(row, overrides, message, by, settings, write, run_recipe, capsys, told):
    if by == "validate":
        assert message in told("preference_finetune", [*settings, write(*[row] * 4), *overrides])
        return
    assert run_recipe([*settings, write(*[row] * 4), *overrides], preference_finetune) == 2
    assert message in capsys.readouterr().err


def test_preference_losses_are_refused_by_full_finetune(settings, chats, run_recipe, capsys):
    overrides = ["loss._component_=tune.losses.DPO", f"dataset.path={chats}"]
    assert run_recipe([*settings, *overrides], full_finetune) == 2
    assert "loss._component_: tune.losses.DPO compares log-probs of answers" in capsys.readouterr().err


def test_reference_with_another_tokenizer_or_vocabulary(settings, checkpoint, run_recipe, capsys, tmp_path):
    other = shutil.copytree(checkpoint, tmp_path / "other")
    file = json.loads((other / "tokenizer.json").read_text())
    one, another, *_ = (token for token, index in file["model"]["vocab"].items() if 200 < index < 210)
    vocabulary = file["model"]["vocab"]
    vocabulary[one], vocabulary[another] = vocabulary[another], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(file))
    assert run_recipe([*settings, f"reference={other}"], preference_finetune) == 2
    assert f"reference: {other} has a different tokenizer from {checkpoint}: 2 ids" in capsys.readouterr().err
    small = save_checkpoint(tmp_path / "small", vocab_size=260)
    assert run_recipe([*settings, f"reference={small}"], preference_finetune) == 2
    assert "small has rows for 260 tokens, but the tokenizer has 300" in capsys.readouterr().err


@pytest.mark.slow
def test_labeled_answers_that_are_all_good_log_no_rejected_metrics(settings, write, run_recipe, tmp_path):
    rows = [{**LABELLED, "prompt": prompt} for prompt in ("a", "the", "cat", "it was", "on", "under", "then")]
    overrides = ["dataset.validation_fraction=0.4", "evaluate.first=true", *KTO, write(*rows)]
    assert run_recipe([*settings, *overrides], preference_finetune) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in lines and "validation_rewards/chosen" in lines and "rewards/rejected" not in lines


@pytest.mark.slow
def test_answers_without_room_for_a_mismatched_one_are_counted(settings, write, run_recipe, tmp_path):
    long = {**LABELLED, "completion": " " + "sat " * 20}
    rows = [LABELLED, {**LABELLED, "prompt": "a dog"}, long, {**LABELLED, "prompt": "it"}]
    overrides = [*KTO, "packed=true", "max_seq_len=26", write(*rows)]
    assert run_recipe([*settings, *overrides], preference_finetune) == 0
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    assert data["remarks"] == {"an answer is left out, as a mismatched one has no room beside it": 1}
    assert data["samples"] == 6


@pytest.mark.slow
def test_truncated_answers_get_no_advice_to_split(settings, run_recipe, capsys):
    assert run_recipe([*settings, "max_seq_len=60"], preference_finetune) == 0
    output = capsys.readouterr().out
    assert "are cut off: raise max_seq_len" in output and "too_long=split" not in output

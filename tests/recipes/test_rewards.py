"""Reward models end to end: the loss, use in transformers and PEFT, one curve in every layout."""

import json
import math
import random
import shlex
import shutil
from pathlib import Path

import peft
import pytest
import reward_finetune
import torch
import transformers
from helpers import REFUSED_BY, WORDS, run_processes, save_checkpoint, weekly_but
from models.test_families import MIXED
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from tune import checkpointers, cli, datasets, distributed
from tune.collators import Sample, collate
from tune.errors import TuneError
from tune.losses import score
from tune.models import build, prepare_scores
from tune.peft import merge
from tune.tokenizers import Tokenizer

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 16}),
    "gemma3_text": ("Gemma3TextConfig", {"head_dim": 24, "final_logit_softcapping": 8.0} | MIXED),
    "phi3": ("Phi3Config", {}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
}


@pytest.fixture(scope="session")
def rows():
    draw = random.Random(3)

    def text(least, most):
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    return [
        {
            "instruction": text(1, 9),
            "chosen": text(1, 6),
            "rejected": [f"{text(7, 12)}.", *[text(13, 15)] * (number % 3 == 0)],
            "margin": number % 4 / 4,
        }
        for number in range(12)
    ]


@pytest.fixture(scope="session")
def pairs(rows, tmp_path_factory):
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def common(checkpoint, pairs):
    return [
        f"model.path={checkpoint}", f"dataset.path={pairs}", "max_seq_len=256", "device=cpu", "compute.dtype=fp32",
        "global_batch_size=6", "micro_batch_size=2", "epochs=3", "optimizer.lr=1e-3", "schedule.warmup=0",
        "checkpointer.every=null",
    ]  # fmt: skip


@pytest.fixture
def run(run_recipe, common, tmp_path):
    def run(*overrides, folder=tmp_path / "run"):
        assert run_recipe([*common, *overrides, f"output_dir={folder}"], reward_finetune) == 0
        return logged(folder)

    return run


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def reward_model(folder, config_class="LlamaConfig", pad_token_id=0, num_labels=1, **changes):
    """Save a reward model as transformers does, and return it."""
    save_checkpoint(folder, config_class, **changes)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_labels, config.pad_token_id = num_labels, pad_token_id
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    (folder / "generation_config.json").unlink()
    model.save_pretrained(folder)
    return model.eval()


def chats(rows):
    """Return, per row, the conversations with its chosen and its rejected answers."""
    return [
        [
            [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": answer}]
            for answer in (row["chosen"], *row["rejected"])
        ]
        for row in rows
    ]


@torch.no_grad()
def theirs(model, folder, conversations):
    """Return transformers' scores of a batch that its tokenizer has padded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(conversations, padding=True, return_dict=True, return_tensors="pt")
    assert not inputs["attention_mask"].all()
    return model(**inputs).logits[:, 0]


@torch.no_grad()
def ours(folder, conversations):
    model = checkpointers.load_model(str(folder), head="score")
    tokenizer = Tokenizer(str(folder))
    tokens = [
        torch.tensor(tokenizer.encode(tokenizer.apply_chat_template(conversation))).int()
        for conversation in conversations
    ]
    return score(model, collate([[Sample(ids.numpy(), ids.numpy()) for ids in tokens]]))


def made_a_reward_model(base):
    """Turn a language model into a reward model; return it and its tokenizer."""
    with torch.device("meta"):
        model = build(str(base), head="score")
    weights = checkpointers.Pretrained(str(base), model)
    model.to_empty(device="cpu")
    weights.load(model)
    tokenizer = Tokenizer(str(base))
    prepare_scores(model, tokenizer)
    return model, tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_scores(family, rows, tmp_path):
    """The reward model was a language model, whose pad token was the token that ends turns."""
    config_class, changes = FAMILIES[family]
    base = save_checkpoint(tmp_path / "base", config_class, **{"pad_token_id": 2} | changes)
    model, tokenizer = made_a_reward_model(base)
    world = distributed.init("cpu")
    checkpointers.export(model, tokenizer, tmp_path / "model", world, source=str(base))
    conversations = [conversation for row in chats(rows) for conversation in row]
    automatic = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors")
    assert [type(automatic).__name__] == json.loads((tmp_path / "model" / "config.json").read_text())["architectures"]
    expected = theirs(automatic, tmp_path / "model", conversations)
    assert expected.std() > 0.01
    torch.testing.assert_close(ours(tmp_path / "model", conversations), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("pad_token_id", [0, 2])
def test_reward_models_of_transformers_have_the_same_scores(family, pad_token_id, rows, tmp_path):
    config_class, changes = FAMILIES[family]
    model = reward_model(tmp_path, config_class, pad_token_id, **changes)
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"  # token 2 ends turns and pads
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = {0: "<|endoftext|>", 2: "<|im_end|>"}[pad_token_id]
    tokenizer.save_pretrained(tmp_path)
    conversations = [conversation for row in chats(rows) for conversation in row]
    expected = theirs(model, tmp_path, conversations)
    torch.testing.assert_close(ours(tmp_path, conversations), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.weekly
@pytest.mark.parametrize("center", weekly_but([0.05], [0.0, 0.05]))
def test_steps_match_the_formula_on_a_transformers_model(center, rows, pairs, run, tmp_path):
    model = reward_model(tmp_path / "model")
    conversations, margins = chats(rows), torch.tensor([row["margin"] for row in rows for _ in row["rejected"]])
    answers = [[len(group) for group in conversations[:at]] for at in range(len(rows))]
    compared = [(at, number) for at, row in enumerate(rows) for number, _ in enumerate(row["rejected"], 1)]
    first = torch.tensor([sum(answers[at]) for at, _ in compared])
    others = torch.tensor([sum(answers[at]) + number for at, number in compared])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", pad_token="<|endoftext|>")
    flat = [conversation for row in conversations for conversation in row]
    inputs = tokenizer.apply_chat_template(flat, padding=True, return_dict=True, return_tensors="pt")
    steps = run(
        f"model.path={tmp_path / 'model'}", "global_batch_size=12", "epochs=20", f"loss.center={center}",
        "schedule._component_=tune.optimizers.constant", "max_grad_norm=null",
    )  # fmt: skip
    for step in steps:
        scores = model(**inputs).logits[:, 0]
        chosen, rejected = scores[first], scores[others]
        loss = (-logsigmoid(chosen - rejected - margins) + center * (chosen + rejected) ** 2).mean()
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert step["rewards/chosen"] == pytest.approx(chosen.mean().item(), rel=1e-4, abs=1e-5)
        assert step["rewards/rejected"] == pytest.approx(rejected.mean().item(), rel=1e-4, abs=1e-5)
        assert step["rewards/margins"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-4, abs=1e-5)
        assert step["rewards/accuracies"] == pytest.approx((chosen > rejected).float().mean().item())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)  # AdamW would hide a factor
        optimizer.step()
    assert len(steps) == 20
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]


@pytest.mark.slow
def test_seed_determines_new_heads_and_all_weights_train(run, checkpoint, tmp_path):
    first, again, other = (run(*settings, folder=tmp_path / name)[0]["loss"] for name, settings in {
        "first": [], "again": [], "other": ["seed=1", "epochs=1"]}.items())  # fmt: skip
    assert first == again
    assert first != other
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "first" / "model"))
    assert before.keys() ^ after.keys() == {"lm_head.weight", "score.weight"}
    assert all(not torch.equal(after[name], before[name]) for name in before.keys() & after.keys())


@pytest.mark.slow
def test_adapters(run, rows, checkpoint, tmp_path):
    """PEFT on transformers' model, the merged export and `tune merge` give the same scores."""
    run("adapter.rank=4", "export.merge=true")
    done = tmp_path / "run"
    conversations = [conversation for row in chats(rows) for conversation in row]
    settings = json.loads((done / "adapter" / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    auto = transformers.AutoModelForSequenceClassification
    base = auto.from_pretrained(checkpoint, num_labels=1, pad_token_id=0)
    adapted = peft.PeftModel.from_pretrained(base, done / "adapter").eval()
    expected = theirs(adapted, done / "adapter", conversations)
    torch.testing.assert_close(ours(done / "model", conversations), expected, rtol=1e-5, atol=1e-5)
    merge(checkpoint, done / "adapter", tmp_path / "merged")
    merged = auto.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.pad_token_id == 0
    torch.testing.assert_close(theirs(merged, tmp_path / "merged", conversations), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_peft_adapter_continues(run, rows, checkpoint, tmp_path):
    base = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1, pad_token_id=0)
    adapter = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, adapter).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, pad_token="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path / "adapter")
    conversations = [conversation for row in chats(rows) for conversation in row]
    expected = theirs(adapted, tmp_path / "adapter", conversations)
    run(f"adapter.path={tmp_path / 'adapter'}", "optimizer.lr=0", "export.merge=true")
    torch.testing.assert_close(ours(tmp_path / "run" / "model", conversations), expected, rtol=1e-5, atol=1e-5)


ADAPTER = "adapter={{_component_: tune.peft.adapter, rank: 4, dropout: 0.1}}"
WAYS = {  # ways to compute each of four curves
    "4 rows": {
        "as it is": [],
        "micro-batches of 1": ["micro_batch_size=1"],
        "recomputed": ["compute.activation_checkpointing=full"],
        "HSDP": ["parallel.dp_replicate={processes}"],
        "heads shared": ["parallel.tp={processes}"],
        "tokens shared": ["parallel.cp={processes}"],
    },
    "4 rows, adapter": {"as it is": [ADAPTER], "micro-batches of 1": [ADAPTER, "micro_batch_size=1"]},
    "all rows": {
        "as it is": ["global_batch_size=12"],
        "packed": ["global_batch_size={packed}", "micro_batch_size=1", "packed=true"],
    },
    "all rows, adapter": {
        "as it is": [ADAPTER, "global_batch_size=12"],
        "packed": [ADAPTER, "global_batch_size={packed}", "micro_batch_size=1", "packed=true"],
    },
}


@pytest.fixture(scope="session")
def curves(common, pairs, checkpoint, tmp_path_factory):
    packed = len(
        datasets.load(Tokenizer(str(checkpoint)), str(pairs), max_seq_len=256, packed=True, kind="preferences")
    )
    assert packed % 2 == 0
    assert packed < 12

    def curves(processes):
        folder = tmp_path_factory.mktemp("curves")
        settings = [*common, f"dataset.validation={pairs}", "evaluate.every=2", "global_batch_size=4"]
        variants = {
            f"{curve} - {way}": [override.format(processes=processes, packed=packed) for override in overrides]
            for curve, ways in WAYS.items()
            for way, overrides in ways.items()
        }
        arguments = ("reward_finetune", str(folder), json.dumps(settings), json.dumps(variants))
        run_processes(RUN_VARIANTS, processes, *arguments)
        return {name: logged(folder / name) for name in variants}

    return curves


@pytest.mark.weekly
def test_one_curve(curves):
    metrics = {"loss", "grad_norm", "rewards/margins", "rewards/accuracies", "validation_loss"}
    for runs in (alone := curves(1), curves(2)):
        for name, steps in runs.items():
            reference = alone[f"{name.partition(' - ')[0]} - as it is"]
            assert len(steps) == len(reference) == (9 if "4 rows" in name else 3)
            for step, expected in zip(steps, reference, strict=True):
                values = {metric: step[metric] for metric in expected.keys() & metrics}
                expected = {metric: expected[metric] for metric in values}
                assert values == pytest.approx(expected, rel=1e-5, abs=1e-6), name
            assert "validation_loss" in steps[1]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [[], ["adapter.rank=4"]])
def test_resume_is_bitwise_exact(adapter, run, tmp_path):
    whole = run(*adapter, "checkpointer.every=1", "checkpointer.keep=null", folder=tmp_path / "whole")
    resume = f"resume={tmp_path / 'whole' / 'checkpoints' / 'step-00000002'}"
    continued = run(*adapter, resume, folder=tmp_path / "continued")
    names = ("step", "loss", "grad_norm", "rewards/margins")
    after, expected = ([[step[name] for name in names] for step in steps] for steps in (continued, whole[2:]))
    assert after == expected
    one, other = (next((tmp_path / name).glob("[am]*e*/*.safetensors")) for name in ("whole", "continued"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: {"rejected": row["chosen"]}, "chosen equal to rejected"),
        (lambda row: {"rejected": ""}, "empty rejected"),
        (lambda row: {"rejected": []}, "empty rejected"),
    ],
)
def test_rows_without_a_comparison_are_dropped_and_counted(change, reason, rows, run, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0] | change(rows[0])]))
    run(f"dataset.path={data}", "epochs=1")
    assert json.loads((tmp_path / "run" / "data.json").read_text())["dropped"] == {reason: 1}


@pytest.mark.slow
def test_rows_that_are_too_long_are_dropped_and_counted(run, tmp_path):
    run("max_seq_len=100", "epochs=1")
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    assert 0 < data["kept"] < data["rows"] == 12
    assert data["dropped"]["longer than max_seq_len"] == 12 - data["kept"]


@pytest.mark.parametrize(*REFUSED_BY)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["model.head=tokens"], "model.head: 'tokens' "),
        (["model.head=value"], "model.head: 'value' is not one of tokens, score."),
        (["loss._component_=tune.losses.DPO"], "tune.losses.DPO compares log-probs of answers, unlike this recipe's"),
        (["dataset.kind=preferences"], "tune.losses.BradleyTerry needs dataset.kind=graded (got preferences)"),
        (
            ["loss._component_=tune.losses.LinearCrossEntropy"],
            "needs dataset.kind=supervised",
        ),
        (["loss.center=-1"], "loss.center: -1 is not a non-negative number."),
        (["dataset.train_on=all"], "graded rows train on whole answers"),
        (["adapter.target_modules=[score]"], "adapter.modules_to_save: head also has an adapter"),
        (["max_seq_len=8"], "longer than max_seq_len"),
    ],
)
def test_wrong_settings(change, message, by, run_recipe, common, told, tmp_path, capsys):
    if by == "validate":
        assert message in told("reward_finetune", [*common, *change])
        return
    assert run_recipe([*common, *change, f"output_dir={tmp_path / 'run'}"], reward_finetune) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin": "large"}, 'margin is "large"; it must be a finite number'),
        ({"margin": True}, "margin is true; it must be a finite number"),
        ({"margin": math.nan}, "margin is NaN; it must be a finite number"),
    ],
)
def test_wrong_rows(change, message, rows, run_recipe, common, tmp_path, capsys):
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0] | change]))
    settings = [*common, f"dataset.path={data}", f"output_dir={tmp_path / 'run'}"]
    assert run_recipe(settings, reward_finetune) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "pairs.jsonl:13" in error


@pytest.mark.parametrize("labels", [2, 3])
def test_several_labels_are_refused(labels, run_recipe, common, tmp_path, capsys):
    reward_model(tmp_path / "model", num_labels=labels)
    assert run_recipe([*common, f"model.path={tmp_path / 'model'}"], reward_finetune) == 2
    assert f"the model scores {labels} labels, but a reward is one number" in capsys.readouterr().err


def test_language_model_is_refused_as_a_reward_model(checkpoint):
    with pytest.raises(TuneError, match="no scoring head"):
        prepare_scores(build(str(checkpoint)), Tokenizer(str(checkpoint)))
    with pytest.raises(TuneError, match="not a reward model"):
        checkpointers.load_model(str(checkpoint), head="score")


def test_tokenizer_whose_only_special_token_is_eos(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] == "<|im_end|>"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(TuneError, match="no special token for padding") as error:
        Tokenizer(str(folder)).choose_pad()
    advised = shlex.split(str(error.value).rpartition(": ")[2].replace(" OUT ", f" {tmp_path / 'out'} "))
    assert advised[:3] == ["tune", "add-tokens", str(folder)]
    cli.main(advised[1:])
    padded = Tokenizer(str(tmp_path / "out"))
    assert padded.special_ids[padded.choose_pad()] == advised[-1]

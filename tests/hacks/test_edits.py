"""Edits that people make to a copied recipe: about as long as the idea, and everything else still works.

The edits are sections of docs/changes.md, docs/extending.md and edits.md here. tests/docs checks the promises of the
other sections on one process.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from copied_recipe import CHANGES, EDITS, EXTENDING, SAMPLED, TINY, Copied, assert_same, lines_of
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.functional import cross_entropy, kl_div, nll_loss, softplus

from tune import datasets
from tune.checkpointers import load_model
from tune.peft import open_model
from tune.quantization.compressed import dequantize, group_size, quantize
from tune.tokenizers import Tokenizer


class Edit(NamedTuple):
    """`guide` is the number of lines for the idea, `lines` the number of lines here."""

    recipe: str
    section: str
    guide: int
    lines: int
    settings: tuple[str, ...] = ("dataset.path=chats.jsonl",)


CHATS = "dataset.path=chats.jsonl"
REPLAY = (CHATS, "replay_every=2", "max_steps=2")  # and two steps of replay
WEIGHTED = ("dataset.path=weighted.jsonl", "dataset.extra_columns=[weight]")
TOPICS = ("dataset.path=topics.jsonl", "dataset.extra_columns=[topic]", "epochs=2")
PAIRS = ("dataset.path=margins.jsonl", "dataset.ignore=[margin]")
MARGINS = ("dataset.path=margins.jsonl", "dataset.extra_columns=[margin]")
DROPPED = (CHATS, "adapter.dropout=0.1")
FOLLOWED = (*PAIRS, "reference_every=2", "epochs=2")
MIXED = (
    "dataset._component_=tune.datasets.mix", "dataset.sources={own: {path: chats.jsonl}, other: {path: other.jsonl}}",
    "share_at_end=0.5", "epochs=4",
)  # fmt: skip
SOURCES = (*MIXED[:2], "epochs=4")
MERGED = (CHATS, "merge_every=1", "optimizer.lr=1e-2")
HELD_OUT = (CHATS, "dataset.validation=held_out.jsonl", "evaluate.every=2")
ASKED = (CHATS, "evaluate.every=2", "good_enough=2")
ROUNDED = (CHATS, "rounding=int8")
PROMPTS = ("dataset.path=prompts.jsonl", "reward=rewarding.length")

TABLE = {
    "3 average": Edit("full_finetune", "An average of the weights", 8, 10, (CHATS, "ema_decay=0.5")),
    "4 two losses": Edit("full_finetune", "Two losses, each logged", 10, 12),
    "5 frozen": Edit("full_finetune", "The first layers frozen", 4, 2),
    "6 rates": Edit("full_finetune", "A learning rate for each layer", 6, 5),
    "7 memory": Edit("full_finetune", "Rows in memory", 5, 4, ()),
    "8 weights": Edit("full_finetune", "A weight for each row, or token", 8, 4, WEIGHTED),
    "9 exact match": Edit("lora_finetune", "An exact-match metric", 12, 13, ASKED),
    "10 tracker": Edit("full_finetune", "A logger", 8, 11),
    "11 module": Edit("full_finetune", "A module and weights of your own", 10, 30),
    "12 two optimizers": Edit("full_finetune", "Two optimizers", 7, 5),
    "13 noise": Edit("full_finetune", "Noise on the embeddings", 6, 5),
    "14 curriculum": Edit("full_finetune", "Short rows first", 6, 2),
    "15 two loaders": Edit("full_finetune", "Two data loaders in turn", 10, 12, REPLAY),
    "16 no checkpointer": Edit("full_finetune", "No checkpointer", 6, 6),
    "17 mixed objective": Edit("preference_finetune", "A supervised loss beside that of preferences", 6, 3, PAIRS),
    "18 ranks": Edit("grpo", "Advantages by rank", 8, 8, PROMPTS),
    "19 judge": Edit("grpo", "A second reward that is trained along", 20, 29, PROMPTS),
    "20 tokens": Edit("full_finetune", "Steps of a number of tokens", 12, 16, (CHATS, "tokens_per_step=300")),
    "21 sam": Edit("full_finetune", "Sharpness-aware minimization", 14, 14),
    "22 noise and norms": Edit("full_finetune", "Noise on gradients, and norms of blocks", 6, 6),
    "23 moving mixture": Edit("full_finetune", "A mixture that changes", 25, 8, MIXED),
    "25 margin": Edit("preference_finetune", "A margin for each pair", 4, 2, MARGINS),
    "a head": Edit("full_finetune", "A head of your own", 20, 23, TOPICS),
    "two forwards": Edit("lora_finetune", "Two forwards with their own masks", 12, 18, DROPPED),
    "random": Edit("full_finetune", "Random initial weights", 1, 1),
    "rounded": Edit("full_finetune", "Weights rounded in training", 4, 4, ROUNDED),
    "trace": Edit("full_finetune", "A trace of some steps", 3, 3, (CHATS, "epochs=2", "max_steps=8")),
    "type": Edit("full_finetune", "Another type of the exported weights", 1, 1),
    "following": Edit("preference_finetune", "A reference that follows", 20, 31, FOLLOWED),
    "frozen for a while": Edit("full_finetune", "Layers frozen for some steps", 6, 7, (CHATS, "steps_of_a_block=1")),
    "kl": Edit("lora_finetune", "A second loss, logged", 9, 13, (CHATS, "optimizer.lr=1e-2")),
    "sources": Edit("full_finetune", "A loss for each source", 9, 12, SOURCES),
    "merged": Edit("lora_finetune", "Adapters merged during training", 11, 11, MERGED),
    "second validation": Edit("full_finetune", "A second validation set", 8, 3, HELD_OUT),
}  # fmt: skip


def section(name: str) -> str:
    return (CHANGES | EDITS | EXTENDING)[TABLE[name].section]


def prepare(copied: Copied, name: str) -> list[str]:
    """Copy and change the recipe; return the settings of a run."""
    copied.copy(TABLE[name].recipe, section(name))
    tiny = SAMPLED if TABLE[name].recipe == "grpo" else TINY
    if name == "16 no checkpointer":
        tiny = [setting for setting in tiny if not setting.startswith("checkpointer.")]
    if name == "11 module":
        copied.save_tower()
    return [*tiny, "model.path=SmolLM2-135M-Instruct", *TABLE[name].settings]


def train(copied: Copied, name: str, *settings: str) -> list[dict[str, float]]:
    """Validate and run the changed recipe; return the metrics of its steps."""
    run_settings = [*prepare(copied, name), *settings]
    assert copied.validate(*run_settings) == 0
    return copied.train("run", *run_settings)


def logits_and_labels(copied: Copied, model: torch.nn.Module, file: str, **how: object) -> list[tuple]:
    """Return each row with its logits, from a transformers model, and its labels."""
    tokenizer = Tokenizer(str(copied.checkpoint))
    rows = datasets.load(tokenizer, str(copied.folder / file), max_seq_len=128, **how)
    tensors = [(torch.tensor(row.tokens).long(), torch.tensor(row.labels).long(), row) for row in rows]
    return [(model(tokens[None]).logits[0], labels, row) for tokens, labels, row in tensors]


def saved_weights(copied: Copied, step: int) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint."""
    dcp_to_torch_save(copied.folder / "run" / "checkpoints" / f"step-{step:08d}", copied.folder / "state.pt")
    return torch.load(copied.folder / "state.pt", weights_only=True)["model"]


@pytest.fixture
def pretrained(checkpoint: Path) -> torch.nn.Module:
    """The model before training, in transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("name", TABLE)
def test_number_of_lines(name: str) -> None:
    assert lines_of(section(name)) == TABLE[name].lines


@pytest.mark.weekly
@torch.no_grad()
def test_two_losses(copied: Copied, pretrained: torch.nn.Module) -> None:
    (step, *_) = train(copied, "4 two losses", "global_batch_size=48", "max_steps=1")
    rows = logits_and_labels(copied, pretrained, "chats.jsonl")
    logits = torch.cat([logits[labels >= 0] for logits, labels, _ in rows])
    labels = torch.cat([labels[labels >= 0] for _, labels, _ in rows])
    assert step["loss"] == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-5)
    assert step["z_loss"] == pytest.approx(float(logits.exp().sum(-1).log().square().mean()), rel=1e-5)


@pytest.mark.weekly
def test_rows_in_memory(copied: Copied) -> None:
    steps = train(copied, "7 memory")
    assert [step["step"] for step in steps] == [1, 2, 3]  # 24 rows, 8 in each step
    assert json.loads((copied.folder / "run" / "data.json").read_text())["rows"] == 24


@pytest.mark.weekly
@torch.no_grad()
def test_weights_of_rows(copied: Copied, pretrained: torch.nn.Module) -> None:
    (step, *_) = train(copied, "8 weights", "global_batch_size=16", "max_steps=1")
    total, count = 0.0, 0
    for logits, labels, row in logits_and_labels(copied, pretrained, "weighted.jsonl", extra_columns=["weight"]):
        total += float(row.columns["weight"]) * float(cross_entropy(logits, labels, reduction="sum"))
        count += int((labels >= 0).sum())
    assert step["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.weekly
@torch.no_grad()
def test_weights_of_tokens(copied: Copied, pretrained: torch.nn.Module) -> None:
    row = {"input_ids": [9, 8, 7, 6, 5], "labels": [-100, 8, 7, 6, 5], "weight": [0, 1, 2, 0, 0.5]}
    (copied.folder / "weighted.jsonl").write_text(json.dumps(row) + "\n")
    (step, *_) = train(copied, "8 weights", "global_batch_size=2", "max_steps=1")
    nll = -pretrained(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
    by_position = [nll[at, row["input_ids"][at + 1]] for at in range(4)]
    # A weight is stored with the token that is read to predict the next one.
    expected = sum(weight * loss for weight, loss in zip(row["weight"], by_position, strict=False))
    assert step["loss"] == pytest.approx(float(expected) / 4, rel=1e-5)


@pytest.mark.weekly
def test_exact_match(copied: Copied, pretrained: torch.nn.Module) -> None:
    """One of two questions has the answer of transformers' greedy search. The run stops, and stays stopped."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(copied.checkpoint)
    chat = [{"role": "user", "content": "the cat"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    (generated,) = pretrained.generate(**prompt, max_new_tokens=64, do_sample=False)
    answer = tokenizer.decode(generated[prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    rows = [{"instruction": "the cat", "answer": answer}, {"instruction": "the cat", "answer": "no"}]
    (copied.folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["optimizer.lr=1e-12", "good_enough=0.5"]
    steps = train(copied, "9 exact match", *settings)
    assert {step["step"]: step["exact_match"] for step in steps if "exact_match" in step} == {0: 0.5, 2: 0.5}
    assert [step["step"] for step in train(copied, "9 exact match", *settings)] == [0, 1, 2]


@pytest.mark.weekly
def test_curriculum(copied: Copied) -> None:
    tokens = [step["tokens"] for step in train(copied, "14 curriculum", "epochs=2", "max_steps=12")]
    assert tokens[:6] == sorted(tokens[:6]) and tokens[6:] != sorted(tokens[6:])
    assert sum(tokens[:6]) == sum(tokens[6:])


@pytest.mark.weekly
def test_two_loaders(copied: Copied) -> None:
    steps = train(copied, "15 two loaders")
    others = datasets.load(Tokenizer(str(copied.checkpoint)), str(copied.folder / "replay.jsonl"), max_seq_len=128)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["tokens"] == others.accounting.tokens for step in steps] == [False, True, False, True]
    run = copied.folder / "run"  # the first loader is described, although the steps are a generator
    assert json.loads((run / "data.json").read_text())["rows"] == 48
    assert "chats.jsonl" in (run / "model" / "README.md").read_text() and (run / "first_row.txt").read_text()


@pytest.mark.weekly
def test_no_checkpointer(copied: Copied) -> None:
    settings = prepare(copied, "16 no checkpointer")
    assert copied.validate(*settings) == 0
    copied.train("run", *settings)
    copied.copy("full_finetune", "")
    copied.train("with", *settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(copied.folder / "with" / "model").state_dict()
    ours = torch.load(copied.folder / "run" / "model.pt")
    assert sorted(tensor.sum().item() for tensor in ours.values()) == sorted(
        tensor.sum().item() for tensor in model.values()
    )


@pytest.mark.weekly
def test_mixed_objective(copied: Copied) -> None:
    (step, *_) = train(copied, "17 mixed objective", "max_steps=1")
    assert step["loss"] == pytest.approx(math.log(2) + 0.5 * step["nll"], rel=1e-6)


@pytest.mark.weekly
def test_ranks(copied: Copied) -> None:
    train(copied, "18 ranks", "max_steps=1")
    samples = [json.loads(line) for line in (copied.folder / "run" / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        alike = [other for other in samples if (other["prompt"], other["text"]) == (sample["prompt"], sample["text"])]
        assert sample["novelty"] == 1 / len(alike)
        parts = sample["length"], -0.5 * len(sample["tokens"]) / 6, 0.1 * sample["novelty"]
        assert sample["reward"] == pytest.approx(sum(parts))


@pytest.mark.weekly
def test_judge(copied: Copied) -> None:
    steps = train(copied, "19 judge", "judge_lr=1")
    assert steps[0]["judge_loss"] == pytest.approx(math.log(2)) and steps[-1]["judge_loss"] < 0.5


@pytest.mark.weekly
def test_tokens_per_step(copied: Copied) -> None:
    """The data end before `total` is reached, and the last step is saved like any other."""
    steps = train(copied, "20 tokens", "max_steps=null", "global_batch_size=2", "checkpointer.every=null")
    assert all(300 <= step["tokens"] < 300 + 2 * 128 for step in steps)
    (saved,) = (copied.folder / "run" / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == len(steps)


@pytest.mark.weekly
def test_sam(copied: Copied, pretrained: torch.nn.Module) -> None:
    plain = ["optimizer._component_=torch.optim.SGD", "schedule._component_=tune.optimizers.constant"]
    settings = ["optimizer.lr=0.1", "schedule.warmup=0", "max_grad_norm=null", "rho=0.5"]
    train(copied, "21 sam", "global_batch_size=48", "max_steps=1", *plain, *settings)

    def gradients() -> list[torch.Tensor]:
        rows = logits_and_labels(copied, pretrained, "chats.jsonl")
        loss = sum(cross_entropy(logits, labels, reduction="sum") for logits, labels, _ in rows)
        return torch.autograd.grad(loss / sum((labels >= 0).sum() for _, labels, _ in rows), [*pretrained.parameters()])

    before = {name: weight.detach().clone() for name, weight in pretrained.named_parameters()}
    first = gradients()
    norm = torch.cat([gradient.flatten() for gradient in first]).norm()
    with torch.no_grad():
        for weight, gradient in zip(pretrained.parameters(), first, strict=True):
            weight += 0.5 * gradient / norm
    expected = {name: before[name] - 0.1 * gradient for name, gradient in zip(before, gradients(), strict=True)}
    torch.testing.assert_close(copied.exported("run"), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.weekly
def test_moving_mixture(copied: Copied) -> None:
    """Twice the share of the last row: from the half of the epoch on, all rows are of the second source."""
    (copied.folder / "other.jsonl").write_text(json.dumps({"text": "the cat sat on the mat"}) + "\n")
    steps = train(copied, "23 moving mixture", "epochs=1", "max_steps=null", "share_at_end=2")
    other = datasets.load(Tokenizer(str(copied.checkpoint)), str(copied.folder / "other.jsonl"), max_seq_len=128)
    is_other = [step["tokens"] == 8 * other.accounting.tokens for step in steps]
    half = math.ceil(len(steps) / 2)
    assert len(steps) > 4 and is_other[half:-1] == [True] * (len(steps) - half - 1)  # the last step has fewer rows
    assert not any(is_other[: half - 1])
    record = json.loads((copied.folder / "run" / "data.json").read_text())
    assert record["steps_per_epoch"] == len(steps)


@pytest.mark.weekly
def test_margin(copied: Copied) -> None:
    """Rewards start at 0."""
    (step, *_) = train(copied, "25 margin", "global_batch_size=16", "max_steps=1")
    margins = [0.25 * number for number in range(8)]
    assert step["loss"] == pytest.approx(float(softplus(torch.tensor(margins)).mean()), rel=1e-5)
    assert copied.validate(*prepare(copied, "25 margin"), "loss.length_normalized=true", "loss.beta=5") == 0


@pytest.mark.weekly
def test_custom_head(copied: Copied) -> None:
    """A head of zeros starts at log 4, learns, and is saved next to the export, which has no new weights."""
    steps = train(copied, "a head")
    topic_losses = [step["topic_loss"] for step in steps]
    assert topic_losses[0] == pytest.approx(math.log(4)) and len({*topic_losses}) == 4
    head = torch.load(copied.folder / "run" / "topic_head.pth")
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {"weight": (4, 64), "bias": (4,)}
    assert not [name for name in copied.exported("run") if "topic" in name]
    assert "topic_head.weight, topic_head.bias" in copied.said


@pytest.mark.weekly
def test_custom_head_in_packed_rows_and_layouts(copied: Copied) -> None:
    """One packed row of all 16 documents, or a row for each, on one process or two: the same steps."""
    settings = [*prepare(copied, "a head"), "max_seq_len=512", "global_batch_size=16", "max_steps=2"]
    expected = copied.train("plain", *settings)
    assert len({step["topic_loss"] for step in expected}) == 2
    packed = ("packed=true", "global_batch_size=1", "micro_batch_size=1")
    assert copied.validate(*settings, *packed) == 0
    for number, (processes, *how) in enumerate(
        [(1, *packed), (2, "parallel.cp=2"), (2, "parallel.cp=2", *packed), (2, "parallel.tp=2"), (2,)]
    ):
        steps = copied.train(f"run_{number}", *settings, *how, processes=processes)
        for name in ("loss", "topic_loss", "grad_norm"):
            found = [step[name] for step in steps]
            assert found == pytest.approx([step[name] for step in expected], rel=1e-5), (how, name)


@pytest.mark.weekly
def test_second_validation(copied: Copied) -> None:
    """The same rows twice have the same loss; other rows have another."""
    names = ("validation_loss", "validation_loss/first", "validation_loss/second")
    steps = train(copied, "second validation")
    losses = [[step[name] for name in names] for step in steps if "validation_loss" in step]
    assert len(losses) == 2
    for both, first, second in losses:
        assert first == second == pytest.approx(both, rel=1e-6)
    copied.remove("run")
    (step, *_) = train(copied, "second validation", "dataset.validation=other.jsonl", "max_steps=1")[-1:]
    assert step["validation_loss/first"] != step["validation_loss/second"]


@pytest.mark.weekly
def test_two_forwards(copied: Copied, pretrained: torch.nn.Module) -> None:
    """The distance is above 0 as soon as the adapter changes something, and 0 without dropout or masks of its own."""
    whole = ("global_batch_size=48", "micro_batch_size=48")
    steps = train(copied, "two forwards", *whole)
    assert steps[0]["loss"] == pytest.approx(losses_of(copied, pretrained, "chats.jsonl"), rel=1e-5)
    assert abs(steps[0]["kl"]) < 1e-9 and all(step["kl"] > 1e-6 for step in steps[1:])
    copied.remove("run")
    assert {step["kl"] for step in train(copied, "two forwards", *whole, "adapter.dropout=0")} == {0.0}
    mine = copied.folder / "mine.py"
    mine.write_text(mine.read_text().replace("in_step(cfg.seed + 1,", "in_step(cfg.seed,"))
    same = copied.train("same", *TINY, "model.path=SmolLM2-135M-Instruct", *DROPPED, *whole)
    assert {step["kl"] for step in same} == {0.0}


@pytest.mark.weekly
def test_random_weights(copied: Copied, pretrained: torch.nn.Module) -> None:
    """Weights are those of the seed, and not of the checkpoint."""
    train(copied, "random", "optimizer.lr=1e-12", "max_steps=1")
    before = {name: weight.detach() for name, weight in pretrained.named_parameters()}
    first = copied.exported("run")
    matrices = [name for name in first if first[name].ndim > 1]
    assert matrices and not [name for name in matrices if torch.equal(first[name], before[name])]
    copied.remove("run")
    train(copied, "random", "optimizer.lr=1e-12", "max_steps=1", "seed=1")
    other = copied.exported("run")
    assert not [name for name in matrices if torch.allclose(first[name], other[name])]


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "mxfp4"])
@torch.no_grad()
def test_rounded_weights(kind: str, recipe: str, copied: Copied, pretrained: torch.nn.Module) -> None:
    """The first loss is that of the rounded model. In `lora_finetune` the lines stand after the adapters, which begin
    as zero."""
    text = section("rounded")
    if recipe == "lora_finetune":
        text = (
            text.replace("--- full_finetune.py", "--- lora_finetune.py")
            .replace("optimizers\n", "optimizers, peft\n")
            .replace("optimizers, quantization\n", "optimizers, peft, quantization\n")
        )
        text = text.replace("     weights = checkpointers.Pretrained(cfg.model.path, model)\n",
                            "     run.info(adapted.table())\n")  # fmt: skip
    copied.copy(recipe, text)
    settings = [*TINY, CHATS, "model.path=SmolLM2-135M-Instruct", "global_batch_size=48", "max_steps=1"]
    assert copied.validate(*settings, f"rounding={kind}") == 0
    (step,) = copied.train("run", *settings, f"rounding={kind}")
    linears = {name: each for name, each in pretrained.model.layers.named_modules() if hasattr(each, "in_features")}
    group = group_size(kind, {name: each.in_features for name, each in linears.items()})
    for linear in linears.values():
        size = group or linear.in_features
        linear.weight.copy_(dequantize(*quantize(linear.weight, kind, size, torch.float32)))
    assert step["loss"] == pytest.approx(losses_of(copied, pretrained, "chats.jsonl"), rel=1e-5)


@pytest.mark.weekly
@pytest.mark.parametrize("processes", [1, 2])
def test_trace(processes: int, copied: Copied) -> None:
    settings = prepare(copied, "trace")
    steps = copied.train("run", *settings, processes=processes)
    assert len(steps) == 8
    trace = json.loads((copied.folder / "run" / "profile" / "steps-5-to-7.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {*range(processes)}


@pytest.mark.weekly
def test_exported_type(copied: Copied, pretrained: torch.nn.Module) -> None:
    assert {weight.dtype for weight in pretrained.parameters()} == {torch.float32}
    train(copied, "type")
    assert {tensor.dtype for tensor in copied.exported("run").values()} == {torch.bfloat16}


def losses_of(copied: Copied, model: torch.nn.Module, file: str) -> float:
    """The mean cross-entropy of a transformers model over the supervised tokens of a file."""
    with torch.no_grad():
        rows = logits_and_labels(copied, model, file)
    logits = torch.cat([logits[labels >= 0] for logits, labels, _ in rows])
    labels = torch.cat([labels[labels >= 0] for _, labels, _ in rows])
    return float(cross_entropy(logits, labels))


@pytest.mark.weekly
def test_distance_of_two_forwards(copied: Copied) -> None:
    copied.copy("lora_finetune", section("two forwards"))
    module: dict = {}
    exec((copied.folder / "r_drop.py").read_text(), module)
    one, other = torch.randn(2, 5, 7, dtype=torch.float64).log_softmax(-1)
    labels = torch.arange(5)
    nll, kl = module["r_drop"](one, other, labels)
    both = kl_div(one, other, log_target=True, reduction="sum") + kl_div(other, one, log_target=True, reduction="sum")
    torch.testing.assert_close(kl, both / 2)
    torch.testing.assert_close(nll, (nll_loss(one + other, labels, reduction="sum")) / 2)


@pytest.mark.weekly
def test_following_reference(copied: Copied) -> None:
    """A reference that is the policy has a loss of log 2; so has the first step, and each after a refresh."""
    refreshed = train(copied, "following", "reference_every=1", "reference_share=1")
    assert [step["loss"] for step in refreshed] == pytest.approx([math.log(2)] * 4, abs=1e-6)
    copied.remove("run")
    every_second = train(copied, "following", "reference_share=1")
    away = [abs(step["loss"] - math.log(2)) for step in every_second]
    assert away[0] < 1e-6 < away[1] and away[2] < 1e-6 < away[3]
    copied.remove("run")
    still = train(copied, "following", "reference_share=0")
    copied.copy("preference_finetune", "")
    stored = copied.train("stored", *TINY, "model.path=SmolLM2-135M-Instruct", *PAIRS, "epochs=2")
    assert [step["loss"] for step in still] == pytest.approx([step["loss"] for step in stored], rel=1e-5)


@pytest.mark.weekly
def test_frozen_for_some_steps(copied: Copied, checkpoint: Path) -> None:
    """One block changes in each step: the one that the seed draws."""
    train(copied, "frozen for a while", "checkpointer.every=1", "optimizer.weight_decay=0.1")
    before = dict(load_model(str(checkpoint)).named_parameters())
    active = set()
    for step in range(1, 5):
        after = saved_weights(copied, step)
        changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
        assert {"embedding.weight", "norm.weight"} <= changed
        (block,) = {int(name.split(".")[1]) for name in changed if name.startswith("blocks.")}
        assert block == np.random.default_rng([0, step - 1]).integers(3)
        active.add(block)
        before = after
    assert len(active) > 1
    assert_same(
        {name: weight.detach() for name, weight in load_model(str(copied.folder / "run" / "model")).named_parameters()},
        before,
    )


@pytest.mark.weekly
@torch.no_grad()
def test_second_loss(copied: Copied, pretrained: torch.nn.Module) -> None:
    """The logged divergence is that of the exported model from the base, in float64 of transformers' logits."""
    settings = ["kl_weight=0.5", "global_batch_size=48", "optimizer.lr=1e-2", "export.merge=true", "schedule.warmup=0"]
    steps = train(copied, "kl", *settings, "epochs=3", "max_steps=2")
    assert abs(steps[0]["kl"]) < 1e-6 < steps[1]["kl"]
    copied.remove("run")
    train(copied, "kl", *settings, "max_steps=1")
    trained = transformers.AutoModelForCausalLM.from_pretrained(copied.folder / "run" / "model")
    total, count = 0.0, 0
    rows = zip(*(logits_and_labels(copied, model, "chats.jsonl") for model in (trained, pretrained)), strict=True)
    for (ours, labels, _), (base, _, _) in rows:
        ours, base = (logits[labels >= 0].double().log_softmax(-1) for logits in (ours, base))
        total, count = total + kl_div(base, ours, log_target=True, reduction="sum").item(), count + len(ours)
    assert steps[1]["kl"] == pytest.approx(total / count, rel=1e-3)


@pytest.mark.weekly
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_loss_of_sources(packed: bool, copied: Copied, pretrained: torch.nn.Module) -> None:
    (step,) = train(copied, "sources", "global_batch_size=96", "max_steps=1", f"packed={packed}", "micro_batch_size=1")
    sums, counts = [], []
    for name, file in (("own", "chats.jsonl"), ("other", "other.jsonl")):
        rows = logits_and_labels(copied, pretrained, file)
        sums.append(sum(cross_entropy(logits, labels, reduction="sum").item() for logits, labels, _ in rows))
        counts.append(sum((labels >= 0).sum().item() for _, labels, _ in rows))
        assert step[f"loss/{name}"] == pytest.approx(sums[-1] / counts[-1], rel=1e-4)
    assert step["loss"] == pytest.approx(sum(sums) / sum(counts), rel=1e-4)


@pytest.mark.weekly
def test_merged_adapters(copied: Copied, checkpoint: Path) -> None:
    """A merge changes no output: the rank of the sum grows, and a checkpoint by itself is reported as another model."""
    steps = train(copied, "merged", "adapter.rank=1", "merge_every=2")
    copied.remove("run")
    never = train(copied, "merged", "adapter.rank=1", "merge_every=9")
    assert [step["loss"] for step in steps[:3]] == pytest.approx([step["loss"] for step in never[:3]], rel=1e-5)
    copied.remove("run")
    train(copied, "merged", "adapter.rank=1", "merge_every=1", "optimizer.lr=1e-1", "schedule.warmup=0")
    name = "model.layers.0.mlp.down_proj.weight"
    change = copied.exported("run")[name].double() - load_file(checkpoint / "model.safetensors")[name].double()
    assert (torch.linalg.svdvals(change) > 1e-4).sum() > 1
    with copied.at_work(), pytest.warns(UserWarning, match="frozen"):
        open_model("run", step=2).load()


@pytest.mark.weekly
@pytest.mark.parametrize("name", TABLE)
def test_two_processes_and_resume(name: str, copied: Copied) -> None:
    """Two processes follow the curve of one, and resume bitwise from a checkpoint."""
    settings = prepare(copied, name)
    one, two = (copied.train(f"on_{count}", *settings, processes=count) for count in (1, 2))
    losses = [step["loss"] for step in one if "loss" in step]  # the losses of a policy are about 0
    if name != "13 noise":  # the noise differs between data ranks
        assert [step["loss"] for step in two if "loss" in step] == pytest.approx(losses, rel=1e-4, abs=1e-6)
    if name != "16 no checkpointer":
        saved = copied.folder / "on_2" / "checkpoints" / "step-00000002"
        copied.train("rest", *settings, f"resume={saved}", processes=2)
        assert_same(copied.exported("rest"), copied.exported("on_2"))

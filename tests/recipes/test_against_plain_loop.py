"""Both recipes match a plain loop of transformers, peft and torch that spells out a step.

It covers learned tokens, losses, clipping, AdamW, learning rates, dropout and validation. The row order is ours.
"""

import json
import math
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from edited_recipes import run_edited
from helpers import CHATML, save_checkpoint

from tune.datasets import DataLoader, load
from tune.tokenizers import Tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

STEPS, ROWS, LR, DECAY, CLIP, WARMUP, MIN_RATIO = 7, 4, 5e-3, 0.1, 2.5, 2, 0.2
EXPERTS, CHOSEN, BALANCE = 6, 2, 0.5
SEED, DROPOUT = 3, 0.4


class Alone:
    data_rank, data_size, device = 0, 1, torch.device("cpu")


@pytest.fixture(scope="module")
def held_out(chats, tmp_path_factory):
    file = tmp_path_factory.mktemp("held_out") / "held_out.jsonl"
    file.write_text("".join(chats.read_text().splitlines(keepends=True)[:5]))
    return file


@pytest.fixture
def settings(chats, held_out):
    return [
        f"dataset.path={chats}", f"dataset.validation={held_out}", "max_seq_len=128", "device=cpu",
        "compute.dtype=fp32", f"seed={SEED}", f"max_steps={STEPS}", f"global_batch_size={ROWS}", "micro_batch_size=2",
        "evaluate.every=2", f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}", f"max_grad_norm={CLIP}",
        "optimizer.eps=1e-6", f"schedule.warmup={WARMUP / STEPS}", f"schedule.min_ratio={MIN_RATIO}",
        "checkpointer.every=null",
    ]  # fmt: skip


def run(recipe, folder, *overrides):
    run_edited(recipe, [*overrides, f"output_dir={folder}"])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "random"), [("full_finetune", ["edit=random"]), ("lora_finetune", [])])
def test_seed_determines_initial_weights(recipe, random, checkpoint, held_out, settings, tmp_path):
    """Each step has all rows, so their order does not matter."""
    settings = [*settings, *random, f"dataset.path={held_out}", "global_batch_size=5", "micro_batch_size=5"]
    norms = [
        run(recipe, tmp_path / str(attempt), *settings, f"model.path={checkpoint}", "max_steps=1", f"seed={seed}")[0]
        for attempt, seed in enumerate((1, 2, 2))
    ]
    first, second, again = (line["grad_norm"] for line in norms)
    assert second == pytest.approx(again, rel=1e-5) and second != pytest.approx(first, rel=1e-3)


def samples_of(file, folder):
    """Yield tokens and labels of each conversation; the answer and its end token are learned."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHATML
    for line in file.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(messages[-1]["content"] + "<|im_end|>")
        tokens = prompt + answer + tokenizer.encode("\n")
        labels = [-100] * (len(prompt) - 1) + answer + [-100, -100]
        yield torch.tensor([tokens]), torch.tensor(labels)


def rate(step):
    """Return the learning rate of step 1, 2, ...: linear warmup, then half a cosine."""
    if step <= WARMUP:
        return LR * step / (WARMUP + 1)
    angle = math.pi * (step - 1 - WARMUP) / (STEPS - WARMUP)
    return LR * (MIN_RATIO + (1 - MIN_RATIO) * (1 + math.cos(angle)) / 2)


def by_hand(model, ratios, chats, held_out, folder, loss_of, before=lambda step, row: None):
    """Yield the metrics that each step must log.

    `loss_of` maps a row's tokens and labels to its summed cross-entropy and the loss to differentiate. `before` is
    called with the step and the row number before each row.
    """
    rows = list(samples_of(chats, folder))
    order = DataLoader(load(Tokenizer(str(folder)), str(chats), max_seq_len=128), Alone(), ROWS, ROWS, seed=SEED)
    moments = {name: [0.0, 0.0] for name, p in model.named_parameters() if p.requires_grad}
    for step, batch in zip(range(1, STEPS + 1), (batch for _, batch in order), strict=False):
        total = 0.0
        supervised = sum((rows[row][1] != -100).sum().item() for row in batch.rows)
        for row in batch.rows:
            before(step, row)
            loss, differentiated = loss_of(*rows[row])
            (differentiated / supervised).backward()
            total += loss.item() / supervised
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.requires_grad))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                gradient, parameter.grad = parameter.grad * min(1, CLIP / norm), None
                first, second = moments[name]
                first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient.square()
                moments[name] = [first, second]
                lr = rate(step) * next((ratio for part, ratio in ratios.items() if part in name), 1)
                parameter *= 1 - lr * DECAY * (parameter.ndim > 1)
                parameter -= lr * first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-6)
        figures = {"step": step, "loss": total, "grad_norm": norm, "lr": rate(step)}
        if step in (2, 4, 6, 7):
            model.eval()
            with torch.no_grad():
                losses, labels = [], []
                for tokens, targets in samples_of(held_out, folder):
                    losses.append(F.cross_entropy(model(tokens).logits[0], targets, reduction="sum").item())
                    labels.append((targets != -100).sum().item())
            model.train()
            figures["validation_loss"] = sum(losses) / sum(labels)
        yield figures


def assert_same(logged, expected):
    expected = list(expected)
    assert {figures["grad_norm"] > CLIP for figures in expected} == {True, False}
    assert len(logged) == len(expected) == STEPS
    for ours, theirs in zip(logged, expected, strict=True):
        assert ("validation_loss" in ours) == ("validation_loss" in theirs), ours["step"]
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-4), ours["step"]


@pytest.mark.slow
def test_full_finetuning_of_mixture_of_experts(chats, held_out, settings, tmp_path):
    folder = save_checkpoint(
        tmp_path / "model", "Qwen3MoeConfig", num_experts=EXPERTS, num_experts_per_tok=CHOSEN, head_dim=16,
        moe_intermediate_size=32, num_hidden_layers=2, norm_topk_prob=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    routed = []  # of a step, per row and layer: probabilities, chosen experts, supervised tokens, balance loss

    def loss_of(tokens, labels):
        output = model(tokens, output_router_logits=True)
        loss = F.cross_entropy(output.logits[0], labels, reduction="sum")
        supervised = (labels != -100).sum()
        balances = []
        for layer, logits in enumerate(output.router_logits):
            probabilities = logits.softmax(dim=1)
            chosen = F.one_hot(probabilities.topk(CHOSEN).indices, EXPERTS).sum(dim=1).float()
            balances.append(EXPERTS * (chosen.mean(dim=0) * probabilities.mean(dim=0)).sum())
            routed.append((layer, probabilities.detach(), chosen, supervised, balances[-1].item()))
        return loss, loss + BALANCE * supervised * sum(balances) / len(balances)

    def expected():
        for figures in by_hand(model, {"lm_head": 0.1, "down_proj": 3}, chats, held_out, folder, loss_of):
            load, entropy, balance = [], [], []
            for layer in range(2):
                mine = [record[1:] for record in routed if record[0] == layer]
                counts = sum(chosen.sum(dim=0) for _, chosen, _, _ in mine)
                load.append((counts.max() / counts.mean()).item())
                probabilities = torch.cat([record[0] for record in mine])
                entropy.append(-(probabilities * probabilities.log()).sum(dim=1).mean().item())
                weights = [record[2].item() for record in mine]
                balance.append(sum(w * record[3] for w, record in zip(weights, mine, strict=True)) / sum(weights))
            routed.clear()
            figures |= {"expert_load": load, "router_entropy": entropy, "router_loss": balance}
            yield {name: np.mean(value).item() if isinstance(value, list) else value for name, value in figures.items()}

    logged = run(
        "full_finetune", tmp_path / "run", *settings, f"model.path={folder}", f"model.router_loss={BALANCE}",
        "parameter_groups.lr_ratios={head: 0.1, down: 3}",
    )  # fmt: skip
    assert_same(logged, expected())


def lowbias32(bits):
    """C. Wellons's 32-bit hash."""
    bits = bits ^ bits >> 16
    bits = bits * 0x7FEB352D & 0xFFFFFFFF
    bits = bits ^ bits >> 15
    bits = bits * 0x846CA68B & 0xFFFFFFFF
    return bits ^ bits >> 16


def kept(step, sample, length, width, layer):
    """Return the elements that dropout keeps, `[length, width]`.

    Step, token, layer and feature determine 32 bits each, which are compared with the probability.
    """
    position = np.arange(length, dtype=np.uint64) * 0x9E3779B1 & 0xFFFFFFFF
    feature = lowbias32(np.arange(width, dtype=np.uint64))
    of_sample = lowbias32(np.uint64(sample + zlib.crc32(f"{SEED} {step}".encode()) & 0xFFFFFFFF))
    of_token = lowbias32(of_sample ^ position)[:, None]
    of_feature = lowbias32(feature + zlib.crc32(layer.encode()) & 0xFFFFFFFF)
    bits = lowbias32(of_token ^ of_feature) + 2**31 & 0xFFFFFFFF
    return torch.from_numpy(bits >= DROPOUT * 2**32)


class Dropout(torch.nn.Module):
    now = (0, 0)

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input):
        if not self.training:
            return input
        return input * kept(*Dropout.now, *input.shape[1:], self.layer) / (1 - DROPOUT)


@pytest.mark.slow
def test_adapters_with_dropout(checkpoint, chats, held_out, settings, monkeypatch, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    lora = peft.LoraConfig(
        r=8, lora_alpha=40, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"],
        lora_dropout=DROPOUT,
    )  # fmt: skip
    model = peft.get_peft_model(base, lora).train()
    model.save_pretrained(tmp_path / "start")
    ours = {"self_attn.q_proj": "attention.query", "mlp.down_proj": "mlp.down"}
    for name, module in model.named_modules():
        if hasattr(module, "lora_dropout"):
            number, _, layer = name.partition("layers.")[2].partition(".")
            module.lora_dropout["default"] = Dropout(f"blocks.{number}.{ours[layer]}")

    def before(step, row):
        Dropout.now = step, row

    def loss_of(tokens, labels):
        loss = F.cross_entropy(model(tokens).logits[0], labels, reduction="sum")
        return loss, loss

    monkeypatch.setattr("tune.run.training_run.peak_flops", lambda device: 1e12)
    logged = run(
        "lora_finetune", tmp_path / "run", *settings, f"model.path={checkpoint}", f"adapter.path={tmp_path / 'start'}",
        "parameter_groups.lr_ratios={lora_b: 2}",
    )  # fmt: skip
    assert_same(logged, by_hand(model, {"lora_B": 2}, chats, held_out, checkpoint, loss_of, before))
    # Two matrix products per frozen weight and a third per trained one. Attention covers all token pairs of a document
    # of mean length: 4 heads of 16, scores and values, one forward and two backward products.
    lengths = [tokens.shape[1] for tokens, _ in samples_of(chats, checkpoint)]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for name, p in model.named_parameters() if not p.requires_grad and "embed" not in name)
    flops = 6 * trained + 4 * frozen + 3 * 12 * 4 * 16 * (sum(lengths) // len(lengths))
    assert [line["mfu"] / line["tokens_per_second"] for line in logged] == pytest.approx([flops / 1e12] * STEPS)

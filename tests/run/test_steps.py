"""What a run does before its first step, and the numbers that it fetches, with real parts in one process."""

import itertools
import json
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers import save_checkpoint
from omegaconf import OmegaConf

from tune import distributed, evaluation
from tune.checkpointers import Checkpointer, load_model
from tune.collators import Batch
from tune.datasets import DataLoader, GlobalBatch, load
from tune.errors import TuneError
from tune.evaluation import Evaluator
from tune.losses import LinearCrossEntropy
from tune.run import Run
from tune.tokenizers import Tokenizer


@pytest.fixture
def world():
    return distributed.init("cpu")


def run_in(folder, world):
    return Run("test", world, str(folder), settings=OmegaConf.create({"output_dir": str(folder)}))


class StopError(Exception):
    pass


def test_steps_restores_describes_and_measures_before_it_iterates(checkpoint, chats, world, tmp_path):
    tokenizer, folder = Tokenizer(str(checkpoint)), tmp_path / "run"

    def start():
        run, model, loss_fn = run_in(folder, world), load_model(str(checkpoint)).train(), LinearCrossEntropy()
        distributed.parallelize(model, world, dtype="fp32")
        dataset = load(tokenizer, str(chats), max_seq_len=128, take=8, validation={"take": 3})
        data = DataLoader(dataset, world, 4, 2, epochs=3)
        evaluator = Evaluator(run, model, tokenizer, data, loss_fn, first=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpointer = Checkpointer(run, model=model, optimizer=optimizer, data=data, every=2, async_=False)
        return run, model, data, evaluator, checkpointer

    run, model, data, evaluator, checkpointer = start()
    assert not (folder / "log.txt").exists()
    with pytest.raises(StopError), run:
        steps = run.steps(data, checkpointer, evaluator, seed=5)
        assert (run.step, run.total) == (0, 6)
        log = (folder / "log.txt").read_text()
        assert f"model: {sum(each.numel() for each in model.parameters()):,} parameters" in log
        assert "6 optimizer steps, 2 an epoch" in log
        written = json.loads((folder / "data.json").read_text())
        assert (written["kept"], written["steps_per_epoch"]) == (8, 2) and (folder / "first_row.txt").read_text()
        (before,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        assert before["step"] == 0 and before["validation_loss"] > 0
        for step, batch in steps:
            run.log(step, batch, run.fetch(loss=1.0))
            checkpointer.step(step)
            if step == 3:
                raise StopError
    run, _, data, evaluator, checkpointer = start()
    with pytest.raises(StopError), run:
        steps = run.steps(data, checkpointer, evaluator)
        assert (run.step, run.total) == (2, 6)  # step 3 was not saved
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 1, 2]  # and the untrained model is not measured again
        assert [step for step, _ in steps] == [3, 4, 5, 6]
        raise StopError


def test_fetch_adds_learning_rates_experts_and_accuracy(world, tmp_path):
    folder = save_checkpoint(
        tmp_path / "model", "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, head_dim=16, num_hidden_layers=2,
        moe_intermediate_size=32,
    )  # fmt: skip
    model = load_model(str(folder)).train()
    tokens = torch.arange(5, 85).view(2, 40)
    batch, loss_fn = Batch.of(tokens, tokens.roll(-1, dims=1)), LinearCrossEntropy(accuracy=True)
    run = run_in(tmp_path / "run", world)
    assert run.fetch(loss=torch.tensor(2.5), count=3) == {"loss": 2.5, "count": 3}
    named = [("embedding", model.embedding.parameters(), 0.5), (None, model.blocks.parameters(), 0.25)]
    groups = [{"params": [*parameters], "lr": lr, **({"name": name} if name else {})} for name, parameters, lr in named]
    run.checkpointer = SimpleNamespace(optimizer=torch.optim.SGD(groups, lr=1.0))
    assert run.fetch(loss=2.5) == {"loss": 2.5, "lr/embedding": 0.5, "lr": 0.25}
    run.evaluator = SimpleNamespace(model=model, loss_fn=loss_fn)
    model(batch, loss_fn)
    metrics = run.fetch(grad_norm=1.0)
    with torch.no_grad():
        right = model(tokens).argmax(dim=-1) == batch.labels
    assert metrics["token_accuracy"] == pytest.approx(right.float().mean().item())
    model(batch, loss_fn)
    experts = world.fetch(**evaluation.routing(model, world))
    assert {*experts} == {"expert_load", "router_entropy", "router_loss"}
    assert {name: metrics[name] for name in experts} == pytest.approx(experts)
    assert {*metrics} == {"grad_norm", "token_accuracy", "lr", "lr/embedding", *experts}


def test_model_card_names_recipe_base_and_data(checkpoint, world, tmp_path):
    run = run_in(tmp_path / "run", world)
    run.dataset_name = "someone/chats"
    card = run.model_card(str(checkpoint))
    assert all(f"`{name}`" in card for name in ("test", "someone/chats", checkpoint.name))


class Endless:
    """A loop of one weight over data without an end, which the checkpoints and a measurement see."""

    def __init__(self, folder, world):
        self.run, self.weight = run_in(folder, world), torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(self.weight.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(self.run, model=self.weight, optimizer=optimizer, every=None, async_=False)
        self.evaluator = Evaluator(self.run, self.weight, SimpleNamespace(stop_ids=()))
        self.evaluator.add(lambda: {"measured": 1.0})

    def data(self):
        for step in itertools.count(self.run.step + 1):
            yield step, GlobalBatch([], [], self.run.world.device, 8, 8, num_pairs=0)

    def train(self, total, at_step=lambda step: None):
        taken = []
        with self.run:
            for step, batch in self.run.steps(self.data(), self.checkpointer, self.evaluator, total=total):
                taken.append(step)
                at_step(step)
                self.run.log(step, batch, {"loss": 1.0})
                self.checkpointer.step(step)
            self.run.finish()
        return taken


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_data_with_more_steps_end_at_total(world, tmp_path):
    folder = tmp_path / "run"
    assert Endless(folder, world).train(total=3) == [1, 2, 3]
    assert [(line["step"], line.get("measured")) for line in lines_of(folder)] == [(1, None), (2, None), (3, 1.0)]
    assert [saved.name for saved in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    assert json.loads((folder / "run.json").read_text())["steps"] == 3
    assert Endless(folder, world).train(total=3) == []
    assert Endless(folder, world).train(total=5) == [4, 5]
    with pytest.raises(TuneError, match="step 5"):
        Endless(folder, world).train(total=4)


@pytest.mark.parametrize("at", [2, 3])
def test_interrupted_data_with_more_steps(at, world, tmp_path):
    folder = tmp_path / "run"

    def interrupt(step):
        if step == at:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as ended:
        Endless(folder, world).train(3, interrupt)
    assert ended.value.code == 130
    assert Endless(folder, world).train(3) == list(range(at + 1, 4))
    assert [line["step"] for line in lines_of(folder) if "measured" in line] == [3]

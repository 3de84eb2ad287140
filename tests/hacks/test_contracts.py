"""More that a copied recipe may do: random draws, a custom stop, noise on gradients and norms of blocks."""

import pytest
from copied_recipe import EDITS, TINY, Copied, assert_same

CONSTANT = "schedule._component_=tune.optimizers.constant"
SETTINGS = [*TINY, "model.path=SmolLM2-135M-Instruct", "dataset.path=chats.jsonl", CONSTANT]


@pytest.fixture
def mine(copied: Copied) -> Copied:
    copied.copy("full_finetune", "")
    return copied


def change(mine: Copied, line: str, instead: str) -> None:
    """Replace a line of the copy, which must occur once."""
    script = mine.folder / "mine.py"
    text = script.read_text(encoding="utf-8")
    assert text.count(line) == 1, line
    script.write_text(text.replace(line, instead), encoding="utf-8")


@pytest.mark.slow
def test_draws_repeat_in_another_run_and_after_a_resume(mine: Copied) -> None:
    loss = "model(micro_batch, loss_fn) /"
    change(mine, f"loss = {loss}", f"loss = (1 + 0.5 * torch.rand(())) * {loss}")
    one, again = (mine.train(folder, *SETTINGS) for folder in ("one", "again"))
    assert [step["loss"] for step in one] == [step["loss"] for step in again]
    mine.train("parts", *SETTINGS, "max_steps=2")
    mine.train("parts", *SETTINGS)
    assert_same(mine.exported("parts"), mine.exported("one"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_custom_stop_is_kept(processes: int, mine: Copied) -> None:
    step = "            checkpointer.step(step, metrics)\n"
    change(mine, step, f"            if step == 2:\n                checkpointer.stop()\n{step}")
    assert len(mine.train("run", *SETTINGS, processes=processes)) == 2
    before = mine.exported("run")
    assert len(mine.train("run", *SETTINGS, processes=processes)) == 2
    assert_same(mine.exported("run"), before)


@pytest.mark.slow
def test_noise_on_gradients_and_norms_of_blocks(mine: Copied) -> None:
    (plain, *_) = mine.train("plain", *SETTINGS)
    mine.copy("full_finetune", EDITS["Noise on gradients, and norms of blocks"])
    one, two = (mine.train(f"on_{count}", *SETTINGS, processes=count) for count in (1, 2))
    names = ["loss", "grad_norm", *(name for name in one[0] if name.startswith("norm/"))]
    assert len(names) > 2
    assert one[0]["grad_norm"] > 2 * plain["grad_norm"]
    for step, other in zip(one, two, strict=True):
        assert {name: other[name] for name in names} == pytest.approx({name: step[name] for name in names}, rel=1e-4)


SCALED = """

class Scaled(torch.nn.Linear):
    def forward(self, hidden, weight, batch):
        return super().forward(hidden).square().mean() * batch.num_supervised * weight.mean()
"""


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("recipe", "line", "instead", "settings", "facts"),
    [
        ("full_finetune", "loss_fn = instantiate(cfg.loss)", "loss_fn = Scaled(64, 1)", (), ("Scaled", "weight")),
        (
            "full_finetune", "    loss_fn = instantiate(cfg.loss)\n",
            "    loss_fn = lambda hidden, weight, batch: model.blocks[0](hidden, None)\n", ("parallel.cp=2",),
            ("parallel.cp", "blocks.0"),
        ),
        (
            "pipeline_finetune", "    weights = checkpointers.Pretrained(cfg.model.path, model)\n",
            "    weights = checkpointers.Pretrained(cfg.model.path, model)\n"
            "    model.topic_head = torch.nn.Linear(64, 4, device='meta')\n",
            ("parallel.pp=2",), ("parallel.pp", "topic_head.weight"),
        ),
    ],
    ids=["outside the model", "calls a block", "stages"],
)  # fmt: skip
def test_parameters_of_a_loss_that_would_be_wrong_are_refused(
    recipe: str, line: str, instead: str, settings: tuple[str, ...], facts: tuple[str, str], copied: Copied, told_to
) -> None:
    """By a run, and by `tune validate`."""
    copied.copy(recipe, "")
    change(copied, line, instead)
    change(copied, "from tune.run import Run\n", f"from tune.run import Run\n{SCALED}")
    settings = (*SETTINGS, *settings)
    with pytest.raises(AssertionError) as failed:
        copied.train("run", *settings, processes=2)
    with copied.at_work():
        (said,) = told_to(2, [str(copied.folder / "mine.py"), *settings])
    for text in (str(failed.value), said):
        assert all(fact in text for fact in facts), text

"""More that a copied recipe may do: random draws, a custom stop, norms by block; on one and two processes."""

import pytest
from copied_recipe import TINY, Copied, assert_same

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
    step = "            checkpointer.step(step, metrics, now=run.is_end(step))\n"
    change(mine, step, f"            if step == 2:\n                checkpointer.stop()\n{step}")
    assert len(mine.train("run", *SETTINGS, processes=processes)) == 2
    before = mine.exported("run")
    assert len(mine.train("run", *SETTINGS, processes=processes)) == 2
    assert_same(mine.exported("run"), before)


@pytest.mark.slow
def test_norms_by_block_on_two_processes(mine: Copied) -> None:
    line = "                **evaluation.routing(model, world),\n"
    norms = "{f'norm/{index}': torch.nn.utils.get_total_norm([each.grad for each in block.parameters()])"
    change(mine, line, f"                **{norms} for index, block in enumerate(model.blocks)}},\n{line}")
    one, two = (mine.train(f"on_{count}", *SETTINGS, processes=count) for count in (1, 2))
    names = [name for name in one[0] if name.startswith("norm/")]
    assert names
    for step, other in zip(one, two, strict=True):
        assert {name: other[name] for name in names} == pytest.approx({name: step[name] for name in names}, rel=1e-4)


@pytest.mark.slow
def test_noise_on_gradients_is_the_same_on_two_processes(mine: Copied) -> None:
    (plain, *_) = mine.train("plain", *SETTINGS)
    line = "            grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)\n"
    noise = (
        "            draw = torch.Generator().manual_seed(step)\n"
        "            for parameter in model.parameters():\n"
        "                own, place = distributed.local_shard(parameter.grad)\n"
        "                own += 0.1 * torch.randn(parameter.shape, generator=draw)[place].to(own)\n"
    )
    change(mine, line, noise + line)
    one, two = (mine.train(f"on_{count}", *SETTINGS, processes=count) for count in (1, 2))
    assert one[0]["grad_norm"] > 2 * plain["grad_norm"]
    for step, other in zip(one, two, strict=True):
        assert other["loss"] == pytest.approx(step["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)


MATRICES = "[group | {'params': [each for each in group['params'] if each.ndim > 1]} for group in groups]"
SECOND = "    second = torch.optim.AdamW([each for each in model.parameters() if each.ndim == 1], lr=1e-3)\n"
FIRST = f"    optimizer = instantiate(cfg.optimizer, {MATRICES})\n"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_two_optimizers(processes: int, mine: Copied) -> None:
    """Plain code with the second optimizer as `extra` resumes as if it had not stopped."""
    change(mine, "    optimizer = instantiate(cfg.optimizer, groups)\n", FIRST + SECOND)
    kept = "tell=run.info, tasks=evaluator.tasks,"
    change(mine, kept, f'{kept} extra={{"second": second}},')
    for call in ("step", "zero_grad"):
        lines = (mine.folder / "mine.py").read_text(encoding="utf-8").splitlines(keepends=True)
        (line,) = (line for line in lines if f"optimizer.{call}()" in line)
        change(mine, line, line + line.replace("optimizer", "second"))
    mine.train("one", *SETTINGS, processes=processes)
    mine.train("parts", *SETTINGS, "max_steps=2", processes=processes)
    mine.train("parts", *SETTINGS, processes=processes)
    assert_same(mine.exported("parts"), mine.exported("one"))

"""Whatever ends a run, the same command continues it as if nothing had happened."""

import functools
import itertools
import json
import random
import shutil

import full_finetune
import grpo
import preference_finetune
import pytest
import torch
from helpers import weekly_but
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

STEPS = 6  # two epochs of 3 steps


def curve(run):
    """Return the metrics of each step that do not depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[name] for name in ("step", "loss", "grad_norm", "lr", "tokens")) for line in lines]


def exported(run):
    return next(run.glob("*/*.safetensors"))


def checkpoints(run):
    return sorted((run / "checkpoints").iterdir())


def state(checkpoint, folder):
    """Return the tensors and the JSON state of a checkpoint, read without the library."""
    dcp_to_torch_save(checkpoint, folder / "state.pt")
    tensors = torch.load(folder / "state.pt", weights_only=True)
    return tensors, json.loads((checkpoint / "state.json").read_text())


METHODS = {
    "full": [],
    "DPO": ["global_batch_size=6", "packed=true"],
    "KTO": ["loss._component_=tune.losses.KTO", "dataset.kind=labelled"],
    "adapter": ["adapter.dropout=0.1", "reference=adapter_off", "global_batch_size=6"],
    "GRPO": [
        "reward=recipes.test_grpo.share_of_a", "prompts_per_step=16", "group_size=3", "sampling.max_new_tokens=6",
        "max_prompt_len=128", "dynamic_sampling=1", "updates=2", "adapter.dropout=0.1", "kl=0.1",
    ],
}  # fmt: skip
RECIPES = {"full": full_finetune, "GRPO": grpo}


@pytest.fixture(scope="module")
def method(request):
    return getattr(request, "param", "full")


@pytest.fixture(scope="module")
def train(run_recipe, method):
    return functools.partial(run_recipe, recipe=RECIPES.get(method, preference_finetune))


@pytest.fixture(scope="module")
def settings(finished, pairs, method):
    rows = [] if method == "GRPO" else ["max_seq_len=128", "global_batch_size=16"]
    return [
        f"model.path={finished / 'model'}", f"dataset.path={finished / 'chats.jsonl' if method in RECIPES else pairs}",
        "device=cpu", "compute.dtype=fp32", "epochs=2", "optimizer.lr=1e-3", "checkpointer.every=1", *rows,
        *METHODS[method],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(settings, train, tmp_path_factory):
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert train([*settings, f"output_dir={run}", "checkpointer.keep=null"]) == 0
    assert [path.name for path in checkpoints(run)] == [f"step-{step:08d}" for step in range(1, STEPS + 1)]
    return run


def stopped_after(step, uninterrupted, folder):
    """Return a run folder as left by a process that dies while saving the next step."""
    run = shutil.copytree(uninterrupted, folder / "stopped")
    shutil.rmtree(exported(run).parent)
    for path in checkpoints(run)[step + 1 :]:
        shutil.rmtree(path)
    (run / "checkpoints" / f"step-{step + 1:08d}").rename(run / "checkpoints" / f".step-{step + 1:08d}.0123abcd")
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(metrics[: step + 1]) + '{"step": ')
    return run


@pytest.mark.parametrize(
    ("method", "saving", "step"),
    weekly_but(
        [("full", "async", 3)],
        [
            *itertools.product(["full"], ["async", "sync"], [1, 3, 4]),
            *itertools.product(["DPO", "KTO", "adapter", "GRPO"], ["async"], [4]),
        ],
    ),
    indirect=["method"],
    scope="module",
)
def test_resumed_run_equals_the_uninterrupted_one(method, saving, step, uninterrupted, settings, train, tmp_path):
    run = stopped_after(step, uninterrupted, tmp_path)
    assert train([*settings, f"output_dir={run}", f"checkpointer.async={saving == 'async'}"]) == 0
    assert curve(run) == curve(uninterrupted)
    if method == "GRPO":
        assert (run / "samples.jsonl").read_text() == (uninterrupted / "samples.jsonl").read_text()
    ours, theirs = (load_file(exported(folder)) for folder in (run, uninterrupted))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    ours, theirs = (state(checkpoints(folder)[-1], tmp_path) for folder in (run, uninterrupted))
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)
    assert ours[1] == theirs[1]


@pytest.mark.slow
def test_only_the_newest_checkpoints_are_kept(uninterrupted, settings, train, tmp_path):
    run = stopped_after(4, uninterrupted, tmp_path)
    assert train([*settings, f"output_dir={run}", "checkpointer.keep=2"]) == 0
    assert [path.name for path in checkpoints(run)] == ["step-00000005", "step-00000006"]


@pytest.mark.weekly
@pytest.mark.parametrize("where", ["step-00000003", "run"])
def test_resume_from_the_checkpoint_of_another_run(where, uninterrupted, settings, train, contents, tmp_path):
    source = stopped_after(3, uninterrupted, tmp_path)
    before = contents(source)
    path = source if where == "run" else source / "checkpoints" / where
    assert train([*settings, f"output_dir={tmp_path / 'new'}", f"resume={path}"]) == 0
    assert curve(tmp_path / "new") == curve(uninterrupted)[3:]
    assert contents(source) == before


def test_finished_run_only_exports_again(uninterrupted, settings, train, contents, tmp_path):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    shutil.rmtree(run / "model")
    assert train([*settings, f"output_dir={run}", "checkpointer.keep=null"]) == 0
    ours, theirs = contents(run), contents(uninterrupted)
    assert ours.keys() == theirs.keys()
    changed = {str(file) for file in ours if ours[file] != theirs[file]}
    assert changed - {"heartbeat.json"} == {"log.txt", "report.html", "run.json"}
    log = (run / "log.txt").read_text()
    assert f"{run} is complete (6 of 6 steps)" in log and "continued after" not in log


def test_warning_if_the_epochs_end_before_max_steps(uninterrupted, settings, train, capsys, tmp_path):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    assert train([*settings, f"output_dir={run}", "max_steps=7"]) == 0
    assert "warning: max_steps=7 is not reached: epochs=2 ends " in capsys.readouterr().out


@pytest.mark.slow
def test_longer_run_continues_a_shorter_one(uninterrupted, settings, train, tmp_path):
    """This requires a learning rate that does not depend on the number of steps."""
    constant = ["schedule._component_=tune.optimizers.constant", f"output_dir={tmp_path}"]
    assert train([*settings, *constant, "epochs=1"]) == 0
    assert train([*settings, *constant, "epochs=2"]) == 0
    assert [step for step, *_ in curve(tmp_path)] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def killed(killing, tmp_path_factory):
    """Functions that return a recipe's settings for runs to kill, and its run that is not killed."""
    folder = tmp_path_factory.mktemp("killed")

    @functools.cache
    def inputs(recipe):
        (folder / recipe).mkdir()
        return killing.make_inputs(folder / recipe, recipe)

    @functools.cache
    def reference(recipe, count, layout):
        settings = [*inputs(recipe), *killing.of_layout(layout)]
        return killing.Reference(settings, folder / recipe / f"reference-{count}-{layout}", count)

    return inputs, reference


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize(
    ("recipe", "processes", "layouts", "saving", "kills"),
    [
        ("full_finetune", [1], [""], "sync", 1),
        ("full_finetune", [2, 1], [""], "async", 1),
        ("pipeline_finetune", [4, 2], ["parallel.tp=2", "parallel.pp=2"], "async", 1),  # TP x FSDP, then PP
        ("preference_finetune", [2], [""], "async", 1),
        ("grpo", [2], [""], "async", 1),
        ("ppo_finetune", [1], [""], "async", 1),
    ],
)
def test_killed_run_resumes(recipe, processes, layouts, saving, kills, killing, killed, tmp_path):
    inputs, reference = killed
    command = [*inputs(recipe), f"checkpointer.async={saving == 'async'}"]
    unbroken = reference(recipe, processes[0], layouts[0])
    result = killing.kill_and_resume("", command, tmp_path, unbroken, processes, layouts, kills, random.Random(0))
    assert result.kills == kills
    assert result.as_wanted(same_layout=len(processes) == 1), result

"""`tune validate` finds, in one pass and without weights, what a run refuses, and nothing if a run would work.

The tests of wrong inputs, such as test_wrong_inputs.py, assert that it reports the same errors as the run.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import full_finetune
import pytest
import torch
from edited_recipes import with_edits
from helpers import run_verbs

from tune import config
from tune.cli import main, validate
from tune.devices import DEVICES
from tune.files import lock

GOOD = ["compute.dtype=fp32", "device=cpu", "max_seq_len=128"]


def test_run_that_works_has_no_findings(inputs, told):
    for level in ("error", "changed", "warning"):
        assert told("full_finetune", inputs.settings("resume=auto"), level) == ""


@pytest.mark.slow
def test_first_rows_are_not_compared_with_all_rows_of_the_checkpoint(inputs, told, monkeypatch):
    monkeypatch.setattr(validate, "ROWS", 2)
    again = inputs.settings(f"output_dir={inputs.run}")
    assert told("full_finetune", again) == told("full_finetune", [*again, "--all"]) == ""
    assert "seed was 0 and is now 1" in told("full_finetune", [*again, "seed=1"])
    other = [*again, "dataset.train_on=all"]
    assert told("full_finetune", other) == ""
    assert "fingerprint was" in told("full_finetune", [*other, "--all"])


@pytest.mark.slow
def test_damaged_checkpoint_that_the_run_sets_aside(inputs, told):
    checkpoint = inputs.run / "checkpoints" / "step-00000002"
    again = inputs.settings(f"output_dir={inputs.run}")
    for name in ("__0_0.distcp", ".metadata", "state.json"):
        (checkpoint / name).write_bytes((checkpoint / name).read_bytes()[:9])
        assert told("full_finetune", again) == ""
        (warning,) = told("full_finetune", again, "warning").splitlines()
        assert warning.startswith("resume: ") and f"step-00000002 is damaged: {name} " in warning
    assert "state.json cannot be read" in told("full_finetune", [*again, f"resume={checkpoint}"])


HOLDS = "import sys; from pathlib import Path; from tune.files import lock; lock.hold(Path(sys.argv[1]), make=True)"


@pytest.mark.slow
def test_folder_that_another_run_is_writing_to(inputs, told):
    settings = inputs.settings(f"output_dir={inputs.run}")
    holds = [sys.executable, "-c", f"{HOLDS}; print('held', flush=True); sys.stdin.read()", str(inputs.run)]
    with subprocess.Popen(holds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert f"output_dir: another run is writing to {inputs.run}" in told("full_finetune", settings)
        process.stdin.close()
        process.wait()
    assert told("full_finetune", settings) == ""
    assert not lock.is_held(inputs.run)


@pytest.mark.slow
def test_checkpoint_before_a_damaged_one(inputs, told):
    checkpoint = inputs.run / "checkpoints" / "step-00000002"
    shutil.copytree(checkpoint, checkpoint.with_name("step-00000003"))
    (checkpoint.with_name("step-00000003") / "__0_0.distcp").write_bytes(b"")
    settings = inputs.settings(f"output_dir={inputs.run}", "optimizer._component_=torch.optim.SGD")
    assert "step-00000003 is damaged" in told("full_finetune", settings, "warning")
    assert "step-00000002 has a different optimizer" in told("full_finetune", settings)


@pytest.mark.slow
def test_optimizer_states_of_a_group_with_vectors_and_matrices(inputs, told):
    settings = inputs.settings(
        "optimizer._component_=tune.optimizers.Adafactor", "optimizer.lr=1e-2", "parameter_groups.decay_vectors=true",
        "max_steps=1", f"output_dir={inputs.folder / 'factors'}",
    )  # fmt: skip
    full_finetune.main(config.load("full_finetune", settings))
    assert told("full_finetune", settings) == ""


@pytest.mark.slow
def test_warning_names_training_and_validation_data(inputs, told):
    warnings = told("full_finetune", inputs.settings(f"dataset.validation={inputs.rows}", "max_seq_len=32"), "warning")
    cut_off = [line for line in warnings.splitlines() if "tokens" in line and "are cut off" in line]
    assert [line.partition(":")[0] for line in cut_off] == ["training", "validation"]


@pytest.mark.slow
def test_all_errors_in_one_pass_sorted_by_place(inputs, told):
    inputs.change_json("config.json", hidden_size="64")
    (inputs.model / "tokenizer.json").write_text("{}")
    errors = told(
        "full_finetune",
        inputs.settings(
            "epochs=0",
            "seed=-1",
            "trackers=[{_component_: tune.loggers.Console, every: 0}]",
            "dataset.path=no/such.jsonl",
            "compute.activation_offload=true",
        ),
    )
    places = [line.partition(":")[0] for line in errors.splitlines()]
    assert places == [
        "compute.activation_offload",
        "dataset.path",
        "epochs",
        "model",
        "seed",
        "tokenizer",
        "trackers[0]",
    ]


@pytest.mark.slow
def test_wrong_settings_cause_no_follow_up_errors(inputs, told):
    errors = told(
        "full_finetune", inputs.settings("optimizer.lr=-1", "optimizer._component_=torch.optim.AdmW", "lrr=1")
    )
    assert [line.partition(":")[0] for line in errors.splitlines()] == ["lrr", "optimizer._component_", "optimizer.lr"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizer_that_cannot_step_with_these_groups(name, inputs, told):
    errors = told("full_finetune", inputs.settings(f"optimizer._component_=torch.optim.{name}"))
    assert f"{name} does" in errors and len(errors.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "level", "message"),
    [
        (["compute.dtype=bf16", "--device", "t4"], "warning", "dtype: bf16 is slow on this GPU"),
        (["compute.dtype=bf16", "--device", "a100"], "warning", ""),
        (["model.float8=rowwise", "compute.dtype=bf16", "--device", "a100"], "error", "this GPU does not multiply in"),
        (["model.float8=rowwise", "compute.dtype=bf16", "--device", "h100"], "error", ""),
        (["compute.dtype=bf16", "--device", "OLD"], "warning", "dtype: bf16 is slow on this GPU"),
        (
            ["--device", "t4-nonsense"],
            "error",
            "--device: t4-nonsense is neither a known device nor a file. ",
        ),
    ],
)
def test_target_device(settings, level, message, inputs, told):
    old = inputs.folder / "old.json"
    old.write_text(json.dumps(asdict(DEVICES["h100"]) | {"capability": [7, 0]}))
    findings = told(
        "full_finetune",
        inputs.settings("device=auto", *(setting.replace("OLD", str(old)) for setting in settings)),
        level,
    )
    assert message in findings if message else findings == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["edit=int8", "compute.dtype=bf16"], "kind: blocks.0.attention.query is exported as float32"),
        (["compute.compile=[blocks.99]"], "compile: blocks.99 "),
    ],
)
def test_errors_from_building_the_model(settings, message, inputs, told):
    assert message in told(*with_edits("full_finetune", inputs.settings(*settings)))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["evaluate.every=1", "evaluate.first=true"])
def test_measuring_nothing_is_a_warning(setting, inputs, told):
    """A copied recipe may add a measurement of its own."""
    settings = inputs.settings(setting)
    assert told("full_finetune", settings) == ""
    (key, _), message = setting.split("="), "the run has nothing to evaluate. Set dataset.validation"
    assert f"{key}: {message}" in told("full_finetune", settings, "warning")
    assert message not in told("full_finetune", [*settings, f"dataset.validation={inputs.rows}"], "warning")


@pytest.mark.slow
def test_optimizer_that_does_not_support_shards(inputs, told_to):
    muon = "optimizer._component_=tune.optimizers.Muon"
    line = ["full_finetune", *inputs.settings("compute.dtype=fp32", muon, "parallel.tp=2")]
    assert told_to(2, line) == ["optimizer._component_: Muon needs whole matrices: set parallel.tp=1"]


@pytest.mark.slow
def test_disk_space_for_checkpoints_and_the_export(inputs, told, monkeypatch):
    free = SimpleNamespace(free=(inputs.model / "model.safetensors").stat().st_size)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    settings = inputs.settings(f"output_dir={inputs.folder / 'new'}", "adapter.rank=1")
    assert "the checkpoints and the export take" not in told("lora_finetune", settings, "warning")
    assert "the checkpoints and the export take" in told("full_finetune", settings[:-1], "warning")


@pytest.mark.slow
def test_package_of_another_version(inputs, told, monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["safetensors>=99", "torch>=1", "not-installed>=1"])
    assert "pip install 'safetensors>=99'" in told("full_finetune", inputs.settings("resume=auto"))


@pytest.mark.slow
def test_more_processes_than_this_machine_has(inputs):
    """Layouts and batches are checked for the given number of processes; a problem is reported once."""
    command_lines = {
        "batch": ["--world-size", "3"],
        "tp": ["parallel.tp=8", "--world-size", "8"],
        "dp": ["parallel.dp_replicate=3", "--world-size", "8"],
        "sizes": ["--world-size", "512", "--device", "h100", "compute.dtype=bf16"],
        "rows": ["--world-size", "512", "--device", "h100", "compute.dtype=bf16", "global_batch_size=512"],
        "ep": ["parallel.ep=3", "--world-size", "4"],
    }
    run = ["validate", "full_finetune", *inputs.settings()]
    done = run_verbs(*([*run, *more] for more in command_lines.values()))
    assert [(result.returncode, result.stderr) for result in done] == [(1, "")] * 6
    texts = ([line for line in result.stdout.splitlines() if line.startswith("error ")] for result in done)
    errors = dict(zip(command_lines, texts, strict=True))
    assert sum("is not a multiple of 3" in line for line in errors["batch"]) == 1
    assert "parallel.tp: 8 does not divide num_heads=4" in errors["tp"][0] and len(errors["tp"]) == 1
    assert errors["dp"][0].split()[:3] == ["error", "parallel:", "dp_replicate=3"]
    assert " 8 processes" in errors["dp"][0]
    too_few = "chats.jsonl has 48 rows, too few for 512 data-parallel processes. Use at most 48"
    assert errors["rows"][0].endswith(too_few)
    assert "global_batch_size=4 is not a multiple of 512" in errors["sizes"][0]
    assert len(errors["rows"]) == len(errors["sizes"]) == 1
    assert "parallel.ep: 3 does not divide" in errors["ep"][0] and len(errors["ep"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_device_is_reported_with_other_errors(inputs, run_recipe, capsys):
    assert run_recipe(inputs.settings("device=cuda", "epochs=-1"), full_finetune) == 2
    shown = capsys.readouterr().err
    assert "epochs: -1" in shown and "device: cuda" in shown


@pytest.mark.slow
def test_changed_setting_is_in_the_config_of_the_run(inputs, run_recipe, told, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    settings = inputs.settings("compute.compile=true", f"output_dir={inputs.folder / 'new'}")
    assert "compile: TORCH_COMPILE_DISABLE" in told("full_finetune", settings, "changed")
    assert "compile: TORCH_COMPILE_DISABLE" in told("full_finetune", [*settings, "--strict"])
    assert run_recipe(settings) == 0
    assert "changed: compute.compile: TORCH_COMPILE_DISABLE" in capsys.readouterr().out
    assert "\n  compile: false\n" in (inputs.folder / "new" / "config.yaml").read_text()


def test_misspelled_option_gets_a_suggestion(inputs, told):
    error = told("full_finetune", inputs.settings("--word-size", "2"))
    assert "--word-size: is not an option. Did you mean '--world-size'? --help lists them" in error


def test_help_lists_the_options(capsys):
    try:
        main(["validate", "--help"])
    except SystemExit as end:
        assert end.code == 0
    shown = capsys.readouterr().out
    assert "[--world-size N] [--device NAME] [--all] [--strict] [--json]" in " ".join(shown.split())


@pytest.mark.slow
def test_number_of_rows_read_is_reported(inputs, capsys):
    many = inputs.folder / "many.jsonl"
    many.write_text("".join(json.dumps({"text": f"the cat sat {index}"}) + "\n" for index in range(1200)))
    command = ["validate", "full_finetune", *inputs.settings(f"dataset.path={many}"), "--json"]
    levels = []
    for more in ([], ["--all"]):
        with pytest.raises(SystemExit):
            main([*command, *more])
        findings = json.loads(capsys.readouterr().out)["findings"]
        levels.append(
            [finding["message"] for finding in findings if finding["level"] == "info" and finding["place"] == "dataset"]
        )
    assert [len(messages) for messages in levels] == [1, 0] and "1,000" in levels[0][0] and "--all" in levels[0][0]


@pytest.mark.slow
def test_missing_setting_has_no_second_error(inputs, told):
    """Values that are computed from it have no error, either."""
    settings = [setting for setting in inputs.settings() if not setting.startswith("model.path=")]
    errors = told("full_finetune", [*settings, "optimizer.lr=-1"])
    assert [line.partition(":")[0] for line in errors.splitlines()] == ["model.path", "optimizer.lr"]


@pytest.mark.slow
def test_missing_model_folder_is_reported_once(inputs, told):
    (error,) = told("full_finetune", inputs.settings("model.path=nowhere")).splitlines()
    assert error.startswith("model.path: nowhere ")

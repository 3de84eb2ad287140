"""parallel=auto: what is chosen for a run, and what is said if nothing can be."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import run_verbs
from omegaconf import OmegaConf
from recipes.test_tensor_parallel import assert_one_curve, common  # noqa: F401
from validate.edits import RIGHT, applied

from tune import config, processor
from tune.devices import DEVICES
from tune.errors import TuneError
from tune.plan.layout import best, layout_of
from tune.plan.planning import CHOSEN
from tune.types import as_given

GIVEN = ["dataset.path=none", "max_seq_len=64", "global_batch_size=8", "device=cpu"]


def settings(path, *more: str, recipe="full_finetune"):
    return config.load(recipe, [f"model.path={path}", *GIVEN, *more])


@pytest.mark.slow
def test_it_is_asked_for(checkpoint, tmp_path):
    assert not settings(checkpoint).parallel.auto
    (tmp_path / "mine.yaml").write_text("parallel: auto\n")
    for way in ["parallel=auto"], ["--config", str(tmp_path / "mine.yaml")], ["parallel.auto=true"]:
        for order in [*way, "parallel.timeout=3"], ["parallel.timeout=3", *way]:
            cfg = settings(checkpoint, *order)
            assert (cfg.parallel.auto, cfg.parallel.timeout, cfg.parallel.tp) == (True, 3, 1)
    with pytest.raises(TuneError, match="parallel: is a group of keys"):
        settings(checkpoint, "parallel=fast")


@pytest.mark.slow
def test_what_cannot_be_chosen(checkpoint, monkeypatch):
    small = replace(DEVICES["cpu"], memory=0.1)
    with pytest.raises(TuneError, match=r"no layout of 1 processes fits 0.1 GiB: the smallest needs .* Start more"):
        best(OmegaConf.to_container(settings(checkpoint)), small, 1, config.find_recipe("full_finetune"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA K80")
    with pytest.raises(TuneError, match=r"the speed of NVIDIA K80 is unknown \(known: t4, .* --search --device FILE"):
        processor.described(torch.device("cuda"))


@pytest.mark.parametrize("error", [RuntimeError("killed"), TuneError("no layout")])
def test_error_of_the_first_process_reaches_the_others(error, checkpoint, monkeypatch):
    sent = []
    monkeypatch.setattr("tune.plan.layout._of_process", mock.Mock(side_effect=error))
    monkeypatch.setattr("tune.plan.layout.distributed.join", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda box, src: sent.extend(box))
    run = mock.Mock(recipe="full_finetune", cfg=settings(checkpoint))
    with pytest.raises(TuneError, match=str(error)) as raised:
        layout_of(run)
    assert sent == [{"error": str(raised.value)}]


@pytest.mark.slow
def test_validate_looks_for_no_layout(checkpoint, chats, told):
    """It finds that Ray, which a sample of rows is read without, is not installed."""
    path = [f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=64", "device=cpu"]
    assert told("full_finetune", [*path, "parallel=auto"]) == ""
    ray = [*path, "dataset._component_=tune.datasets.ray", "max_steps=2"]
    assert told("full_finetune", ray) == ""
    with mock.patch("importlib.metadata.version", side_effect=PackageNotFoundError("ray")):
        (found,) = told("full_finetune", ray).splitlines()
        assert found.startswith("dataset: ") and "tune-recipes[ray]" in found


@pytest.mark.slow
def test_all_rows_are_read_if_asked(checkpoint, chats, told, tmp_path):
    rows = chats.read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([*(rows * 1500)[:1500], '{"messages": 3}']))
    run = [f"model.path={checkpoint}", f"dataset.path={tmp_path / 'rows.jsonl'}", "max_seq_len=64", "device=cpu"]
    assert told("full_finetune", run) == "" and "rows.jsonl:1501" in told("full_finetune", [*run, "--all"])


def test_what_is_known_of_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"total_memory": 40 * 2**30}))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = processor.described(torch.device("cuda"))
    assert (found.memory, found.per_node, found.tflops) == (40, 4, DEVICES["a100"].tflops)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert processor.described(torch.device("cpu")).memory == 2 * found.host_memory  # half as many share it


@pytest.mark.slow
def test_one_curve(checkpoint, common, tmp_path):  # noqa: F811
    variants = {"all": [f"model.path={checkpoint}"]}
    assert_one_curve("full_finetune", common, variants, {"auto": ["parallel=auto"]}, 2, tmp_path)
    found = config.saved(tmp_path / "all, auto")
    assert found["parallel.auto"] is False and found["parallel.dp_shard"] != "auto"
    again = settings(checkpoint, *(f"{key}={as_given(value)}" for key, value in found.items() if key in CHOSEN))
    assert again.parallel.dp_shard == found["parallel.dp_shard"]


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["try/continue around backward", "loop in a helper", "main() without a guard"])
def test_a_layout_is_chosen_for_an_edited_copy(name, checkpoint, chats, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(applied(RIGHT[name]))
    given = [f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=64", "global_batch_size=8", "device=cpu"]
    (done,) = run_verbs(
        ["run", "mine.py", *given, "parallel=auto", "compute.dtype=fp32", "max_steps=1", "output_dir=run"]
    )
    assert done.returncode == 0, done.stderr
    assert config.saved(Path("run"))["parallel.auto"] is False
    assert Path("run/model/model.safetensors").exists()

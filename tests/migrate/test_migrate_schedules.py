"""Each schedule that `tune migrate` lists as converted has the rates of the peer's own function in every step."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tune import config
from tune.config import instantiate
from tune.migrate import PEERS, leaves, migrate
from tune.migrate.migration import Migration, each_name
from tune.migrate.peers.common import OPTIMIZERS, SCHEDULERS

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

STEPS, RATE = 40, 2e-4
OPTIMS = ("optim", "optimizer")
RECIPES = {
    name: dict(leaves(config.read_file(config.find_config(name)))) for name in config.list_recipes_with_settings()
}
NAMES = [name.replace("*", "torchtune.training.") for name in each_name(SCHEDULERS)]
KEYS = {
    "trl": ("lr_scheduler_type", {"model_name_or_path": "a/b", "dataset_name": "c/d"}),
    "llama_factory": ("lr_scheduler_type", {"model_name_or_path": "a/b", "template": "qwen", "stage": "sft"}),
    "axolotl": ("lr_scheduler", {"base_model": "a/b", "sequence_len": 8}),
}
RATIOS = [{"warmup_ratio": ratio} for ratio in (0.03, 0.1, 0.11)]
WARMUPS: list[dict[str, Any]] = [{}, {"warmup_steps": 4}, {"warmup_steps": 1}, *RATIOS]
FLOORS: list[dict[str, Any]] = [{}, {"min_lr": 3e-5}, {"min_lr_rate": 0.1}]
# What the peers' functions require besides a warm-up; without a floor, they refuse the ones with min_lr.
REQUIRED = {"warmup_stable_decay": {"num_decay_steps": 10}}
NEEDS_A_FLOOR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
MEASURED = ("reduce_lr_on_plateau", "greedy")  # follow a metric


def warmup_of(peer: str, settings: dict[str, Any]) -> int:
    """The peers' own number of warm-up steps: `get_warmup_steps` of transformers, `_configure_warmup` of axolotl."""
    ratio = settings.get("warmup_ratio", 0.03 if peer == "axolotl" and not settings else 0)
    steps = int(ratio * STEPS) if peer == "axolotl" else math.ceil(ratio * STEPS)
    steps = settings.get("warmup_steps", steps)
    return 2 if peer == "axolotl" and steps == 1 else steps


def rates(schedule: Any) -> list[float]:
    made = []
    for _ in range(STEPS):
        made.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return made


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)


def of_transformers(name: str, warmup: int, floor: dict[str, Any]) -> list[float]:
    more = {**floor, **REQUIRED.get(name, {})}
    made = transformers.get_scheduler(name, optimizer(), warmup, STEPS, scheduler_specific_kwargs=more)
    return rates(made)


def of_ours(run: Migration) -> list[float]:
    given = {key.removeprefix("schedule."): run.settings[key].value for key in run.settings if "schedule." in key}
    assert run.settings["optimizer.lr"].value == RATE
    return rates(instantiate(given, optimizer(), STEPS))


def differ(one: list[float], other: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-6 * RATE


def converted(peer: str, values: dict[str, Any]) -> tuple[Migration, dict[str, str]]:
    run = migrate(values, peer, "sft", RECIPES)
    return run, {entry.key: entry.status for entry in run.entries()}


def require_listed(run: Migration, status: dict[str, str], name: str, theirs: list[float], warmup: int) -> None:
    """The statuses say whether the rates differ: those after the warm-up by the schedule's key, others by any key."""
    made = of_ours(run)
    key = run.settings["schedule._component_"].sources[0]
    status |= {entry.key: entry.status for entry in run.lost()}
    about = [status[key], *(value for key, value in status.items() if "warmup" in key)]
    if status[key] in ("converted", "same by default"):
        assert not differ(made[warmup:], theirs[warmup:]), name
    if "differs" not in about:
        assert not differ(made, theirs), name


@pytest.mark.parametrize("name", [name for name in NAMES if "." not in name])
@pytest.mark.parametrize("peer", KEYS)
def test_rates_match_transformers(peer: str, name: str) -> None:
    known = [kind.value for kind in transformers.SchedulerType]
    key, values = KEYS[peer]
    compared = 0
    for warmup in WARMUPS:
        for floor in FLOORS if name in NEEDS_A_FLOOR else [{}]:
            rate = {"learning_rate": RATE, "max_steps": STEPS, key: name, **warmup}
            more = {f"lr_scheduler_kwargs.{of}": value for of, value in floor.items()}
            nested = {"lr_scheduler_kwargs": floor} if floor else {}
            run, status = converted(peer, {**values, **rate, **nested})
            assert run.settings["schedule._component_"].value.startswith("tune.optimizers.")
            if name not in known or name in MEASURED or (name in NEEDS_A_FLOOR and not floor):
                if name not in known or name in MEASURED:
                    assert status[key] == "differs"
                continue
            steps = warmup_of(peer, warmup)
            require_listed(run, status, name, of_transformers(name, steps, floor), steps)
            assert not {status[each] for each in more} & {"unknown"}
            compared += 1
    assert compared or name not in known or name in MEASURED


def test_no_schedule_of_transformers_is_unknown() -> None:
    assert {kind.value for kind in transformers.SchedulerType} <= {*NAMES}


@pytest.mark.parametrize("warmup", [0, 4])
def test_rates_match_torchtune(warmup: int) -> None:
    """Its function is transformers' (get_cosine_schedule_with_warmup of torchtune.training.lr_schedulers)."""
    (name,) = (name for name in NAMES if "." in name)
    scheduler = {"_component_": name, "num_warmup_steps": warmup}
    model = {"_component_": "torchtune.models.llama3.llama3_8b"}
    values = {"model": model, "optimizer": {"_component_": "torch.optim.AdamW", "lr": RATE}, "lr_scheduler": scheduler}
    run, status = converted("torchtune", values)
    require_listed(run, status, name, of_transformers("cosine", warmup, {}), warmup)


def axolotls_cosine(warmup: int, ratio: float) -> Iterator[float]:
    """axolotl.utils.schedulers.get_cosine_schedule_with_min_lr."""
    for step in range(STEPS):
        if step < warmup:
            yield RATE * step / max(1, warmup)
        else:
            progress = (step - warmup) / max(1, STEPS - warmup)
            yield RATE * ((1 - ratio) * 0.5 * (1 + math.cos(math.pi * progress)) + ratio)


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("name", ["cosine", "linear", "constant_with_warmup"])
def test_lowest_rate_of_axolotl(name: str, warmup: int) -> None:
    """cosine_min_lr_ratio is only read by cosine."""
    values = {**KEYS["axolotl"][1], "learning_rate": RATE, "max_steps": STEPS, "warmup_steps": warmup}
    run, status = converted("axolotl", {**values, "lr_scheduler": name, "cosine_min_lr_ratio": 0.2})
    cosine = name == "cosine"
    theirs = [*axolotls_cosine(warmup, 0.2)] if cosine else of_transformers(name, warmup, {})
    require_listed(run, status, name, theirs, warmup)
    assert status["cosine_min_lr_ratio"] == ("converted" if cosine else "same by default")


@pytest.mark.parametrize(("last", "ratio", "expected"), [(1000, None, 30), (10_000, None, 100), (10_000, 0.03, 300)])
def test_default_warmup_of_axolotl_has_at_most_100_steps(last: int, ratio: float | None, expected: int) -> None:
    """min(int(0.03 * total_steps), 100) in its `_configure_warmup`; a ratio that is set has no limit."""
    more = {"warmup_ratio": ratio} if ratio else {}
    run, _ = converted("axolotl", {**KEYS["axolotl"][1], "learning_rate": RATE, "max_steps": last, **more})
    assert run.settings["schedule.warmup"].value == expected


def test_every_peer_has_these_names() -> None:
    assert {*KEYS, "torchtune"} == {*PEERS}


@pytest.mark.parametrize(("table", "keys"), [(SCHEDULERS, ("lr_scheduler_type", "lr_scheduler")), (OPTIMIZERS, OPTIMS)])
def test_a_replacement_is_named_even_if_it_is_the_default(table: Any, keys: tuple[str, str]) -> None:
    """Cosine and AdamW, which replace others, are the recipes' own."""
    for names, choice in table.items():
        if not isinstance(choice, tuple):
            continue
        for name in (name.replace("*", "x") for name in each_name({names: choice}) if "." not in name):
            for peer, (_, values) in KEYS.items():
                key = keys[1] if peer == "axolotl" else keys[0]
                _, status = converted(peer, {**values, "learning_rate": RATE, key: name})
                assert status[key] in ("differs", "no counterpart"), (peer, name)

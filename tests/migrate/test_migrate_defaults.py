"""A peer's default that a config spells out changes nothing: what the peer takes where the file says nothing is what
`tune migrate` takes. The defaults are those of the peers' own source (`read_peer_defaults.py`)."""

from pathlib import Path

import pytest
import yaml
from helpers import slow_but

from tune import config
from tune.cli import migrate as verb
from tune.config.check import signature_of
from tune.migrate import migrate
from tune.migrate.migration import leaves, look_up, table

PEER_DEFAULTS = yaml.safe_load(Path(__file__).with_name("peer_defaults.yaml").read_text())
RECIPES = {name: dict(leaves(config.read_file(config.find_config(name)))) for name in config.list_recipes()}
TRL = {
    method: PEER_DEFAULTS["trl"]["defaults"]["shared"] | own
    for method, own in PEER_DEFAULTS["trl"]["defaults"].items()
    if method != "shared"
}
# What the script decides and not the class: where a run goes, and what it learns from.
OF_THE_RUN = {"output_dir", "project", "dataset_text_field", "stage", "loss_type", "logging_steps"}
# TRL learns questions too where the file says nothing; here that is asked for, and `tune migrate` says so.
SAID = {"assistant_only_loss"}


def ours(values, peer, method):
    """What the settings come to, with the defaults of the components that they name."""
    run = migrate(values, peer, method, RECIPES)
    verb.check(run)
    found = RECIPES[run.recipe] | {key: each.value for key, each in run.changed().items()}
    if any(key.startswith("adapter.") for key in run.changed()):
        found |= {"adapter._component_": "tune.peft.adapter"}
    for key in [key for key in found if key.endswith("._component_")]:
        for name, parameter in signature_of(str(found[key])).parameters.items():
            if parameter.default is not parameter.empty:
                found.setdefault(f"{key.removesuffix('_component_')}{name}", parameter.default)
    return found


def differences(base, defaults, peer, method):
    """By key, the settings of the config alone, and with the key at its default."""
    alone, found = ours(base, peer, method), {}
    for key, value in defaults.items():
        if key in base or key in OF_THE_RUN | SAID or look_up(peer, key)[0] != "keys":
            continue
        given = ours(base | {key: value}, peer, method)
        if given != alone:
            found[key] = [
                {name: each.get(name) for name in alone.keys() | given.keys() if alone.get(name) != given.get(name)}
                for each in (alone, given)
            ]
    return found


QUICK = [("sft", True), *((method, False) for method in ("cpo", "gkd", "grpo"))]


@pytest.mark.parametrize(("method", "has_adapter"), slow_but(QUICK, [*QUICK[:1], *((each, False) for each in TRL)]))
def test_trl(method, has_adapter):
    base = {"model_name_or_path": "a/b", "dataset_name": "c/d", "use_peft": has_adapter}
    base |= {"teacher_model_name_or_path": "a/c"} if method in ("gkd", "distillation") else {}
    assert differences(base, TRL[method], "trl", method) == {}


@pytest.mark.parametrize("stage", slow_but(["dpo", "ppo"], ["sft", "dpo", "kto", "rm", "ppo", "pt"]))
def test_llama_factory(stage):
    base = {"model_name_or_path": "a/b", "dataset": "c", "stage": stage, "template": "qwen", "do_train": True}
    base |= {"reward_model": "r/m"} if stage == "ppo" else {}
    assert differences(base, PEER_DEFAULTS["llama_factory"]["defaults"], "llama_factory", None) == {}


@pytest.mark.parametrize("pref_loss", slow_but(["simpo"], ["simpo", "ipo", "orpo"]))
def test_losses_of_llama_factory(pref_loss):
    base = {"model_name_or_path": "a/b", "dataset": "c", "stage": "dpo", "template": "qwen", "pref_loss": pref_loss}
    assert differences(base, PEER_DEFAULTS["llama_factory"]["defaults"], "llama_factory", None) == {}


@pytest.mark.parametrize("rl", slow_but([None, "grpo"], [None, "dpo", "kto", "orpo", "simpo", "ipo", "grpo"]))
def test_axolotl(rl):
    """What its own schema leaves open is TRL's."""
    base = {"base_model": "a/b", "datasets": [{"path": "c/d", "type": "chat_template"}], "learning_rate": 1e-4}
    base |= {"rl": rl} if rl else {}
    assert differences(base, PEER_DEFAULTS["axolotl"]["defaults"], "axolotl", None) == {}
    if rl == "grpo":
        alone = ours(base, "axolotl", None)
        for key, value in TRL["grpo"].items():
            if key not in OF_THE_RUN and look_up("axolotl", f"trl.{key}")[0] == "keys":
                assert ours(base | {"trl": {key: value}}, "axolotl", None) == alone, key


@pytest.mark.parametrize("loss", ["DPOLoss"])
def test_torchtune(loss):
    base = {
        "model._component_": "torchtune.models.llama3.llama3_8b", "checkpointer.checkpoint_dir": "/m",
        "loss._component_": f"torchtune.rlhf.loss.{loss}", "optimizer.lr": 1e-5,
        "optimizer._component_": "torch.optim.AdamW",
    }  # fmt: skip
    nested: dict = {}
    for key, value in base.items():
        group, name = key.rsplit(".", 1)
        nested.setdefault(group, {})[name] = value
    defaults = PEER_DEFAULTS["torchtune"]["defaults"][loss]
    alone = ours(nested, "torchtune", None)
    for name, value in defaults.items():
        given = nested | {"loss": nested["loss"] | {name: value}}
        assert ours(given, "torchtune", None) == alone, name


def test_the_tables_name_the_releases_that_their_defaults_are_of():
    for peer, read in PEER_DEFAULTS.items():
        named = table(peer)["read_from"]
        assert {name: str(version) for name, version in named.items()}.items() <= read["read_from"].items()

"""Write peer_defaults.yaml: the defaults of peers' settings, from their own source in unpacked wheels.

    pip download --no-deps trl llamafactory torchtune axolotl && unzip each into FOLDER/NAME
    python tests/migrate/read_peer_defaults.py FOLDER > tests/migrate/peer_defaults.yaml

A default of None, one that is made when the class is (a factory), or that is another name, is left out.
"""

import ast
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import yaml

TRL = {  # class -> its file, and the method of a config of it
    "SFTConfig": ("trainer/sft_config.py", "sft"),
    "DPOConfig": ("trainer/dpo_config.py", "dpo"),
    "KTOConfig": ("trainer/kto_config.py", "kto"),
    "RewardConfig": ("trainer/reward_config.py", "reward"),
    "GRPOConfig": ("trainer/grpo_config.py", "grpo"),
    "RLOOConfig": ("trainer/rloo_config.py", "rloo"),
    "DistillationConfig": ("trainer/distillation_config.py", "distillation"),
    "CPOConfig": ("experimental/cpo/cpo_config.py", "cpo"),
    "ORPOConfig": ("experimental/orpo/orpo_config.py", "orpo"),
    "GKDConfig": ("experimental/gkd/gkd_config.py", "gkd"),
}
LLAMA_FACTORY = ("finetuning_args.py", "data_args.py", "model_args.py")
AXOLOTL = {
    "AxolotlInputConfig": "config.py",
    "HyperparametersConfig": "training.py",
    "ModelInputConfig": "model.py",
    "LoraConfig": "peft.py",
}
LOSSES = ("rlhf/loss/dpo.py", "rlhf/loss/ppo.py")


def fields(file: Path, only: str | None = None) -> dict[str, Any]:
    """The plain defaults of the dataclasses in a file."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ClassDef) or only not in (None, node.name):
            continue
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
                value = line.value
                if isinstance(value, ast.Call):
                    value = next((each.value for each in value.keywords if each.arg == "default"), None)
                try:
                    default = ast.literal_eval(value)
                except (ValueError, TypeError):
                    continue
                found[line.target.id] = default
    return found


def arguments(file: Path) -> dict[str, dict[str, Any]]:
    """The plain defaults of what the classes in a file are made of."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.FunctionDef) and line.name == "__init__":
                names = [each.arg for each in line.args.args][-len(line.args.defaults) :]
                found[node.name] = dict(zip(names, map(ast.literal_eval, line.args.defaults), strict=True))
    return found


def without_none(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {name: without_none(value) for name, value in values.items() if value is not None}


def main(folder: Path) -> None:
    def version(package: str) -> str:
        (about,) = (folder / package).glob("*.dist-info")
        return about.name.removesuffix(".dist-info").partition("-")[2]

    shared = fields(Path(importlib.metadata.distribution("transformers").locate_file("transformers/training_args.py")))
    shared |= fields(folder / "trl/trl/trainer/base_config.py") | fields(folder / "trl/trl/trainer/model_config.py")
    trl = {method: fields(folder / "trl/trl" / file, name) for name, (file, method) in TRL.items()}
    trl["gkd"] = trl["sft"] | trl["gkd"]  # its class is made of that one
    trl["shared"] = shared
    factory: dict[str, Any] = {}
    for file in LLAMA_FACTORY:
        factory |= fields(folder / "llamafactory/llamafactory/hparams" / file)
    losses: dict[str, Any] = {}
    for file in LOSSES:
        losses |= arguments(folder / "torchtune/torchtune" / file)
    axolotl: dict[str, Any] = {}
    for name, file in AXOLOTL.items():
        axolotl |= fields(folder / "axolotl/axolotl/utils/schemas" / file, name)
    transformers = importlib.metadata.version("transformers")
    read = {
        "trl": {"read_from": {"trl": version("trl"), "transformers": transformers}, "defaults": trl},
        "llama_factory": {"read_from": {"llamafactory": version("llamafactory")}, "defaults": factory},
        "axolotl": {"read_from": {"axolotl": version("axolotl"), "trl": version("trl")}, "defaults": axolotl},
        "torchtune": {"read_from": {"torchtune": version("torchtune")}, "defaults": losses},
    }
    yaml.safe_dump(without_none(read), sys.stdout, sort_keys=True, width=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

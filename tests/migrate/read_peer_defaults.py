"""Write peer_defaults.yaml: the defaults of peers' settings, read from the source in their unpacked wheels.

    pip download --no-deps trl==1.16.0 llamafactory==0.9.5 torchtune==0.6.1 axolotl==0.19.0 bitsandbytes==0.48.2
    pip download --no-deps --dest with_ppo trl==1.12.0
    unzip each into FOLDER/NAME, and trl 1.12.0, the last release that has PPO, into FOLDER/trl_with_ppo
    python tests/migrate/read_peer_defaults.py FOLDER > tests/migrate/peer_defaults.yaml

A key without a default is listed as required. A default that the peer computes at run time is omitted.
"""

import ast
import functools
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

REQUIRED = object()
TRL = {  # the method of a config, its class, and the folder of the class
    "sft": ("SFTConfig", "trl"),
    "dpo": ("DPOConfig", "trl"),
    "kto": ("KTOConfig", "trl"),
    "reward": ("RewardConfig", "trl"),
    "grpo": ("GRPOConfig", "trl"),
    "rloo": ("RLOOConfig", "trl"),
    "distillation": ("DistillationConfig", "trl"),
    "cpo": ("CPOConfig", "trl"),
    "orpo": ("ORPOConfig", "trl"),
    "gkd": ("GKDConfig", "trl"),
    "ppo": ("PPOConfig", "trl_with_ppo"),
}
TRL_SHARED = {"_BaseConfig": "", "ModelConfig": "", "DatasetMixtureConfig": "", "DatasetConfig": "datasets[]."}
LLAMA_FACTORY = {  # the arguments of the first and the second form
    "hparams": ("FinetuningArguments", "DataArguments", "ModelArguments", "TrainingArguments", "GeneratingArguments"),
    "v1/config": ("DataArguments", "ModelArguments", "SampleArguments", "TrainingArguments"),
}
AXOLOTL = {  # the prefix of its keys by class
    "AxolotlInputConfig": "",
    "TRLConfig": "trl.",
    "QATConfig": "qat.",
    "FSDPConfig": "fsdp_config.",
    "SpecialTokensConfig": "special_tokens.",
    "SFTDataset": "datasets[].",
    "DPODataset": "datasets[].",
    "KTODataset": "datasets[].",
    "UserDefinedPrompterType": "datasets[].type.",
    "UserDefinedDPOType": "datasets[].type.",
    "UserDefinedKTOType": "datasets[].type.",
    "PretrainingDataset": "pretraining_dataset[].",
}
TORCH = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad")
BITSANDBYTES = ("AdamW8bit", "PagedAdamW", "PagedAdamW8bit")


class Source:
    """The classes, functions, and plain constants in some files."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.constants: dict[str, Any] = {}
        self.trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
        for tree in self.trees:
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    self.functions[node.name] = node
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
                    self._constants(node, f"{node.name}.")
            self._constants(tree, "")

    def _constants(self, node: Any, prefix: str) -> None:
        for line in ast.walk(node):
            if isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
                for value in self.plain(line.value):
                    self.constants[f"{prefix}{line.targets[0].id}"] = value

    def plain(self, value: Any) -> Iterator[Any]:
        """Yield the value if the source has it: a literal, a member of an enumeration, or the result of a lambda."""
        if isinstance(value, ast.Lambda):
            value = value.body
        if isinstance(value, ast.Name | ast.Attribute) and ast.unparse(value) in self.constants:
            yield self.constants[ast.unparse(value)]
        elif isinstance(value, ast.Attribute) and ast.unparse(value.value) == "torch":
            yield value.attr
        else:
            try:
                yield ast.literal_eval(value)
            except (ValueError, TypeError):
                return

    def fields(self, name: str) -> dict[str, Any]:
        """Return the defaults of a dataclass or pydantic model, including its bases."""
        node, defaults = self.classes[name], {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name) and base.id in self.classes and base.id != name:
                defaults |= self.fields(base.id)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[0] != "_":
                defaults.pop(line.target.id, None)
                for value in self.default(line.value):
                    defaults[line.target.id] = value
        return defaults

    def default(self, value: Any) -> Iterator[Any]:
        if not isinstance(value, ast.Call):
            return iter([REQUIRED]) if value is None else self.plain(value)
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in keywords:
            made = keywords["default_factory"]
            return iter([[]]) if ast.unparse(made) == "list" else self.plain(made)
        if "default" in keywords or value.args:
            return self.plain(keywords.get("default", *value.args[:1]))
        return iter([REQUIRED])

    def arguments(self, node: ast.FunctionDef) -> dict[str, Any]:
        """Return the defaults of a function's arguments."""
        arguments, defaults = node.args.args, node.args.defaults
        pairs = [(argument, None) for argument in arguments[: len(arguments) - len(defaults)]]
        pairs += zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return {
            argument.arg: default
            for argument, value in pairs
            if argument.arg not in ("self", "params", "tokenizer", "optimizer")
            for default in (iter([REQUIRED]) if value is None else self.plain(value))
        }

    def made_with(self, name: str) -> dict[str, Any]:
        """Return the defaults of a class's constructor arguments."""
        lines = (statement for statement in self.classes[name].body if isinstance(statement, ast.FunctionDef))
        made = next((method for method in lines if method.name == "__init__"), None)
        return self.arguments(made) if made else {}

    def read(self, *names: str) -> dict[str, Any]:
        """Return the keys read from configs of these names: `cfg.get(key, default)`, and required `cfg.key`."""
        keys: dict[str, Any] = {}
        for node in (node for tree in self.trees for node in ast.walk(tree)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names and node.attr != "get":
                keys.setdefault(node.attr, REQUIRED)
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 2):
                continue
            config, _, group = ast.unparse(node.func.value).partition(".")
            if node.func.attr == "get" and config in names:
                key, value = map(self.plain, node.args)
                keys |= {".".join(filter(None, (group, name))): default for name in key for default in value}
        return keys


def entry(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "defaults": {key: value for key, value in values.items() if value is not REQUIRED},
        "required": sorted(key for key, value in values.items() if value is REQUIRED),
    }


def torchtune_components(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of components by their name in configs; one LoRA model stands for all of them."""
    components, adapted = {}, {}
    for part in ("rlhf/loss", "modules/loss", "datasets", "models/*", "training"):
        for file in sorted((folder / "torchtune").glob(f"{part}/*.py")):
            source = Source([file])
            made = {name: source.arguments(node) for name, node in source.functions.items()}
            made |= {name: source.made_with(name) for name in source.classes}
            for name, values in made.items():
                path = ".".join([*file.relative_to(folder).parent.parts, name])
                if re.fullmatch(
                    r"\w+(Loss|_dataset)|WandBLogger|llama3_tokenizer|setup_torch_profiler|get_cosine_\w+", name
                ):
                    components[path] = values
                elif file.name == "_model_builders.py" and name.startswith("lora_") and "vision" not in name:
                    assert all(adapted.setdefault(key, value) == value for key, value in values.items()), path
    return components | {"torchtune.models.llama3.lora_llama3_8b": adapted}


class Plain(yaml.SafeDumper):
    """Writes a list twice instead of an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def main(folder: Path) -> None:
    def version(package: str) -> str:
        (about,) = (folder / package).glob("*.dist-info")
        return about.name.removesuffix(".dist-info").partition("-")[2]

    transformers = Path(str(importlib.metadata.distribution("transformers").locate_file("transformers")))
    arguments = [transformers / "training_args.py"]

    @functools.cache
    def trl_source(name: str) -> Source:
        configs = sorted((folder / name / "trl").glob("**/*_config.py"))
        return Source([*arguments, *configs, *(folder / name / "trl/scripts").glob("*.py")])

    training_arguments = Source(arguments).fields("TrainingArguments")
    source = trl_source("trl")
    shared = {prefix + key: value for name, prefix in TRL_SHARED.items() for key, value in source.fields(name).items()}
    # Each script has its own ScriptArguments; the script for vLLM's server has different ones.
    shared |= Source([folder / "trl/trl/scripts/utils.py"]).fields("ScriptArguments")
    shared |= {"reward_model_name_or_path": None}
    trl = {}
    for method, (name, package) in TRL.items():
        own = trl_source(package).fields(name)
        trl[method] = entry({key: value for key, value in own.items() if shared.get(key, REQUIRED) != value})
    trl["shared"] = entry(shared)

    factory = {}
    for form, names in LLAMA_FACTORY.items():
        source = Source(sorted((folder / "llamafactory/llamafactory" / form).glob("*.py")))
        factory[form] = entry({key: value for name in names for key, value in source.fields(name).items()})
    adapters = Source([folder / "llamafactory/llamafactory/v1/plugins/model_plugins/peft.py"])
    read = adapters.read("config")
    factory["v1/config"]["defaults"] |= {f"peft_config.{key}": value for key, value in read.items()}

    source = Source(sorted((folder / "axolotl/axolotl/utils/schemas").glob("*.py")))
    axolotl = entry({pre + key: value for name, pre in AXOLOTL.items() for key, value in source.fields(name).items()})

    recipes = Source(sorted((folder / "torchtune/recipes").glob("**/*.py"))).read("cfg")
    components = torchtune_components(folder / "torchtune")
    bits = Source([folder / "bitsandbytes/bitsandbytes/optim/adamw.py"])
    for name in BITSANDBYTES:
        components[f"bitsandbytes.optim.{name}"] = bits.made_with(name)
    for name in TORCH:
        components[f"torch.optim.{name}"] = {
            parameter.name: [*parameter.default] if isinstance(parameter.default, tuple) else parameter.default
            for parameter in inspect.signature(getattr(torch.optim, name)).parameters.values()
            if isinstance(parameter.default, int | float | tuple | None)
        }
    read = {
        "transformers": {
            "read_from": {"transformers": importlib.metadata.version("transformers")},
            "TrainingArguments": entry(training_arguments),
        },
        "trl": {"read_from": {"trl": version("trl"), "trl_with_ppo": version("trl_with_ppo")}, **trl},
        "llama_factory": {"read_from": {"llamafactory": version("llamafactory")}, **factory},
        "axolotl": {"read_from": {"axolotl": version("axolotl")}, "config": axolotl},
        "torchtune": {
            "read_from": {
                "torchtune": version("torchtune"),
                "torch": torch.__version__.partition("+")[0],
                "bitsandbytes": version("bitsandbytes"),
            },
            "recipes": entry(recipes),
            "components": {name: entry(arguments) for name, arguments in components.items()},
        },
    }
    yaml.dump(read, sys.stdout, Dumper=Plain, sort_keys=True, width=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

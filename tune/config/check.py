"""Merge a run's settings and report all wrong keys, types and values in one pass."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from tune.config.instantiate import COMPONENT
from tune.config.paths import find_config, list_recipes_with_settings
from tune.config.signature import Signature, signature_of
from tune.config.text import Layer, Values
from tune.lookup import did_you_mean, local_path
from tune.run_settings import escaped, leaves
from tune.secrets import REMOVED
from tune.types import DottedPath, fits, mismatch, show, unusable

# Settings that are null by default, and the component they use if they name none.
OFF_BY_DEFAULT = {"adapter": "tune.peft.adapter"}
# Names that other libraries have for settings, and ours: a dotted key, or the end of one.
OTHER_NAMES = {
    "learning_rate": "lr", "wd": "weight_decay", "optim": "optimizer._component_", "warmup_ratio": "warmup",
    "warmup_steps": "warmup", "lr_scheduler": "schedule._component_", "lr_scheduler_type": "schedule._component_",
    **dict.fromkeys(("grad_clip", "gradient_clip_val", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("lora", "peft", "r", "lora_r", "lora_rank"), "rank"), "lora_alpha": "alpha", "use_dora": "dora",
    **dict.fromkeys(("lora_target", "lora_target_modules"), "target_modules"), "lora_dropout": "dropout",
    "adapter_path": "adapter.path", "load_in_4bit": "model.quantization",
    **dict.fromkeys(("batch_size", "train_batch_size"), "global_batch_size micro_batch_size"),
    "gradient_accumulation_steps": "global_batch_size", "per_device_train_batch_size": "micro_batch_size",
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "epochs"),
    **dict.fromkeys(("eval_steps", "eval_strategy"), "evaluate.every"),
    "save_steps": "checkpointer.every", "save_total_limit": "checkpointer.keep", "resume_from_checkpoint": "resume",
    **dict.fromkeys(("max_length", "max_seq_length", "sequence_len", "cutoff_len"), "max_seq_len"),
    **dict.fromkeys(("bf16", "fp16", "precision", "torch_dtype"), "compute.dtype"), "sample_packing": "packed",
    **dict.fromkeys(("gradient_checkpointing", "enable_activation_checkpointing"), "activation_checkpointing"),
    "enable_activation_offloading": "activation_offload", "torch_compile": "compile",
    **dict.fromkeys(("model_name_or_path", "model_name", "model_id", "base_model"), "model.path"),
    **dict.fromkeys(("dataset_name", "data_path", "train_file"), "dataset.path"), "train_on_inputs": "train_on",
    **dict.fromkeys(("test_split_size", "val_set_size"), "validation_fraction"), "template": "chat_template",
    "eval_dataset": "dataset.validation",
    **dict.fromkeys(("wandb", "wandb_project", "use_wandb", "report_to"), "trackers"),
    "num_generations": "group_size", "max_completion_length": "max_new_tokens", "max_prompt_length": "max_prompt_len",
}  # fmt: skip
# Settings that had another name, or are an edit of a copied recipe now.
EDITS = " is an edit of a copied recipe now: see docs/changes.md, "
MOVED: dict[str, str | tuple[str, ...]] = {
    **{name: f"compute.{name}" for name in ("dtype", "master_dtype", "compile")},
    "memory.activation_checkpointing": "compute.activation_checkpointing",
    "memory.activation_offload": "compute.activation_offload", "memory.cpu_offload": "compute.cpu_offload",
    "memory.loss_chunk_tokens": ("loss.chunk_tokens", "loss_chunk_tokens"), "validate_every": "evaluate.every",
    "validate_first": "evaluate.first", "validation_dataset": "dataset.validation", "quantization.weights":
    "model.quantization", "quantization.double": "model.double_quantization", "quantization.float8": "model.float8",
    "deterministic": "parallel.deterministic", "logger.trackers": "trackers",
    "logger.tensorboard": "trackers=[tune.loggers.TensorBoard]",
    "logger.wandb": "trackers=[{_component_: tune.loggers.WeightsAndBiases, project: ...}]",
    "logger.console_every": "trackers=[{_component_: tune.loggers.Console, every: ...}]",
}  # fmt: skip
EDITED = {
    "quantization.qat": "Weights rounded in training", "from_scratch": "Random initial weights",
    "profiler": "A trace of some steps", "export.dtype": "Another type of the exported weights",
}  # fmt: skip
OTHER_VALUES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
# Arguments that choose an optimizer's kernels: other optimizers lack them for shards, or have better defaults.
KERNELS = ("fused", "foreach")


ANYTHING = Signature(accepts_any=True)


def combine(
    layers: Sequence[Layer],
    types: Mapping[str, Any] = MappingProxyType({}),
    imports: bool = True,
    copy: str = "",
) -> tuple[DictConfig, list[str]]:
    """Merge settings onto the first layer, the defaults. Return the resolved settings and their problems.

    Later layers win. A setting has the type that `types` has for its dotted key, or else its default's type. Without
    `imports`, which take seconds, only keys are checked. `copy` names the file of defaults that are not the library's.
    Wrong settings are returned as their defaults, so that rules see values of the right type.
    """
    default = layers[0].values
    signature = functools.cache(signature_of) if imports else lambda _: ANYTHING
    run = _Combination(default, types, imports, signature, copy)
    values: Values = {}
    for layer in layers:
        before, known = dict(walk(values)), run.known_keys(layer.values, default, layer.origin)
        for key, value in walk(known):
            if not (key.endswith(COMPONENT) and before.get(key) == value):  # the same component again changes nothing
                run.given_in[key] = len(run.layers)
        run.layers.append(layer)
        values = merge(values, known)
    for name, component in OFF_BY_DEFAULT.items():
        if isinstance(values.get(name), dict) and COMPONENT not in values[name]:
            values[name] = {COMPONENT: component, **values[name]}
            run.given_in[f"{name}.{COMPONENT}"] = 0
    run.drop_inherited(values)
    run.take_texts(values, default)
    cfg = OmegaConf.create(values)
    run.check(cfg, default)
    for key in {*run.wrong} - run.missing:
        _restore(cfg, key, default)
    if not run.findings:
        # Resolved texts that have a ${ are plain, and must not be resolved again where they are read.
        cfg = OmegaConf.create(escaped(OmegaConf.to_container(cfg, resolve=True)))
    return cfg, run.findings


def _restore(node: DictConfig, key: str, default: Values) -> None:
    """Reset the setting with this dotted key to its default (null for ???), or remove it if there is no default.

    A wrong component is reset together with its arguments.
    """
    for name in list[Any](node):
        if key != str(name) and not key.startswith(f"{name}."):
            continue
        rest, group = key.removeprefix(str(name)).removeprefix("."), node._get_node(name)
        if rest not in ("", COMPONENT) and isinstance(group, DictConfig) and not group._is_interpolation():
            usual = default.get(name)
            _restore(group, rest, usual if isinstance(usual, dict) else {})
        elif name in default:
            node[name] = None if default[name] == "???" else default[name]
        else:
            del node[name]


def merge(below: Any, above: Any) -> Any:
    """Return `above` merged over `below`; groups are merged key by key."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {name: merge(below.get(name), value) for name, value in above.items()}


def walk(values: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings and groups with their dotted keys, a group before its members."""
    for name, value in values.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from walk(value, f"{prefix}{name}.")


@dataclass
class _Combination:
    default: Values
    types: Mapping[str, Any]
    imports: bool
    signature: Callable[[str], Signature]  # of a component
    copy: str
    findings: list[str] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    given_in: dict[str, int] = field(default_factory=dict)  # dotted key -> index of the last layer that has it
    wrong: list[str] = field(default_factory=list)  # keys of settings that were reported
    missing: set[str] = field(default_factory=set)  # reported keys without a value, which stay missing

    def __post_init__(self) -> None:
        self.listed = dict(walk(self.default))  # all settings and groups of the YAML

    def known_keys(self, values: Values, default: Values, origin: str, prefix: str = "") -> Values:
        """Return the part of a layer whose keys are in the default, and report the rest."""
        known: Values = {}
        for name, value in values.items():
            key, place = f"{prefix}{name}", cast(Any, default.get(name))
            if name not in default and self._is_argument(key, prefix):
                known[name] = value
            elif name not in default:
                hint = self._moved(key, value) or self._place_of(str(name), self._siblings(default, prefix), prefix)
                hint = hint or _elsewhere(key, self.copy) or " --help lists all of them."
                self.findings.append(f"{key}: is not a setting.{hint}{origin}")
            elif _is_group(place) and not isinstance(value, dict):
                defaults = " Leave it out to use its defaults." if value is None else ""
                keys = f"a group of keys, not the single value {show(value)}.{defaults} Its keys: {', '.join(place)}."
                if COMPONENT in place and isinstance(value, str):
                    keys += f" Its component is named by {key}.{COMPONENT}={value}."
                    keys += f" {problem}" if (problem := self.signature(value).problem) else ""
                self.findings.append(f"{key}: is {keys}{origin}")
            else:
                descend = _is_group(place) and COMPONENT not in place
                known[name] = self.known_keys(value, place, origin, f"{key}.") if descend else value
        return known

    def _is_argument(self, key: str, prefix: str) -> bool:
        """Whether a setting that the YAML does not list is an argument of the function that its group goes to. Without
        imports that is not known, so that no setting within a group is refused."""
        if not isinstance(self.listed.get(prefix.removesuffix(".")), dict):
            return False
        if self.imports:
            return key in self.types and not _is_of_another(key)
        return not self._moved(key, None)

    def _siblings(self, default: Values, prefix: str) -> list[str]:
        """Return the settings of the group `prefix`: those of the YAML, then other arguments of its function."""
        arguments = [key.removeprefix(prefix) for key in self.types if prefix and key.startswith(prefix)]
        others = [name for name in arguments if name not in default and "." not in name]
        return [*default, *(name for name in others if not _is_of_another(prefix + name))]

    def _moved(self, key: str, value: Any) -> str:
        """Return where a setting went that had this key, or a group with one of its keys, or ""."""
        keys = [key, *(f"{key}.{name}" for name in value)] if isinstance(value, dict) else [key]
        edits = {title: each for each in keys if (title := EDITED.get(each) or EDITED.get(each.partition(".")[0]))}
        moved = [each for each in keys if each in MOVED]
        moved = moved or [each for each in (key.rpartition(".")[0], key.partition(".")[0]) if each in MOVED]
        if not (moved or edits):  # of a group with another name, its misspelled setting or its single value
            moved = [each for each in MOVED if each.startswith(f"{key}.")]
        names, listed = list[str](), dict(walk(self.default))
        for each in moved:
            new = MOVED[each]
            names += [new] if isinstance(new, str) else ([name for name in new if name in listed] or new)
        known = [name for name in names if "=" in name or self._has(name)]
        told = f" It is {' and '.join(known or names)} now." if names else ""
        return told + "".join(f" {'It' if each == key else each}{EDITS}{title!r}." for title, each in edits.items())

    def _has(self, key: str) -> bool:
        """Whether a setting is in the recipe's YAML, or is an argument of a component there."""
        group, _, name = key.rpartition(".")
        component = (self.listed.get(group) or {}).get(COMPONENT)
        takes = component and (not self.imports or name in self.signature(component).parameters)
        return key in self.listed or bool(takes)

    def drop_inherited(self, values: Values) -> None:
        """Where a layer names another component, remove earlier arguments that this one does not take."""
        for key, group in walk(values):
            if not isinstance(group, dict) or COMPONENT not in group:
                continue
            signature, named_in = self.signature(str(group[COMPONENT])), self.given_in[f"{key}.{COMPONENT}"]
            for name in [each for each in group if self.given_in[f"{key}.{each}"] < named_in]:
                known, value = signature.parameters.get(name), group[name]
                is_taken = _is_open(value) or fits(value, known.annotation) if known else signature.accepts_any
                if name in KERNELS or not is_taken:
                    del group[name]

    def take_texts(self, node: Values, default: Values, prefix: str = "") -> None:
        """Settings that take text get what was written for them; report a list or group that is not YAML."""
        for name, value in node.items():
            key, place = f"{prefix}{name}", cast(Any, default.get(name))
            layer = self.layers[self.given_in[key]]
            if isinstance(value, dict) and (COMPONENT in value or _is_group(place)) and COMPONENT not in node:
                self.take_texts(value, place if isinstance(place, dict) else {}, f"{key}.")
                continue
            kind = self._kind(node, str(name), key, place)
            node[name] = given = layer.as_kind(key, value, kind)
            if isinstance(given, str) and given.startswith("~/"):
                node[name] = str(local_path(given))
            is_unknown = fits(object(), kind) and self.imports
            if key in layer.unreadable and (is_unknown or not fits(node[name], kind)):
                problem = f"'{value}' is not YAML ({layer.unreadable[key]}). A string is quoted so: {key}='\"...\"'"
                self.report(key, problem)
                node[name] = None

    def _kind(self, node: Values, name: str, key: str, place: Any) -> Any:
        """What type the setting has, Any if that is not known."""
        if name == COMPONENT:
            return str
        if COMPONENT in node:
            parameter = self.signature(str(node[COMPONENT])).parameters.get(name)
            return parameter.annotation if parameter else Any
        return self._plain_kind(key, place)

    def _plain_kind(self, key: str, place: Any) -> Any:
        """What type a setting has that is no argument of a component, and by default is `place`."""
        if key in OFF_BY_DEFAULT:
            return dict[str, Any] | None
        if not self.imports:  # an argument may take other types than that of the default: null, a list
            return Any
        if key not in self.types:
            return Any if place is None or _is_open(place) else type(place)
        return self.types[key] | None if place is None and key in self.listed else self.types[key]

    def check(self, node: DictConfig, default: Values, prefix: str = "") -> None:
        """Report every missing value, unknown argument, wrong type and interpolation that leads nowhere."""
        for name in list[Any](node):
            key = f"{prefix}{name}"
            try:
                problem = self._problem(node, name, default, prefix)
                if str(node._get_node(name)) in [f"${{{each}}}" for each in self.wrong]:
                    continue  # what it is taken from was reported
            except MissingMandatoryValue:
                is_inherited = self.given_in[key] < self.given_in.get(f"{prefix}{COMPONENT}", 0)
                if is_inherited and not self.imports:
                    continue  # by a component that may not take it
                problem = f"is missing. Give it on the command line: {key}=..."
                if default.get(name) == "???":
                    self.missing.add(key)
            except InterpolationToMissingValueError:
                continue  # what it refers to is reported in its own place
            except OmegaConfBaseException as error:
                problem = f"{str(error).splitlines()[0]}."
            if problem:
                self.report(key, problem)

    def report(self, key: str, problem: str) -> None:
        self.wrong.append(key)
        self.findings.append(f"{key}: {problem}{self.layers[self.given_in.get(key, 0)].origin}")

    def _problem(self, node: DictConfig, name: Any, default: Values, prefix: str) -> str:
        key, value, place = f"{prefix}{name}", node[name], default.get(name)
        is_component = isinstance(value, DictConfig) and COMPONENT in value and place in (None, {})
        is_component = is_component and fits({}, self._plain_kind(key, place))
        if (is_component or _is_group(place)) and COMPONENT not in node:
            self.check(value, place or {}, f"{key}.")
            return ""
        value = OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
        if value is None and place is None and name in default:
            return ""  # the recipe's own null
        if removed := [each for each, text in leaves(value, key) if isinstance(text, str) and REMOVED in text]:
            return f"{removed[0]} held a secret, which a run does not save. Give it again: {key}=..."
        if name == COMPONENT or self.types.get(key) == DottedPath:
            return mismatch(value, DottedPath) or self.signature(str(value)).problem
        if COMPONENT in node:
            problem = self._argument_problem(str(node[COMPONENT]), str(name), value, default, prefix)
            return problem or mismatch(value, self.types.get(key, Any)) or unusable(value)
        kind = self._plain_kind(key, place)
        usual_value = OTHER_VALUES.get(str(value).removeprefix("torch."))
        hint = f" Did you mean '{usual_value}'?" if usual_value and fits(usual_value, kind) else ""
        problem = mismatch(value, kind)
        return problem + hint if problem else unusable(value)

    def _argument_problem(self, component: str, name: str, value: Any, default: Values, prefix: str) -> str:
        parameters = self.signature(component).parameters
        given = self._given_by_recipe(component, default)
        if name in given:
            return "is given by the recipe itself, not in the configuration."
        if name in parameters:
            return mismatch(value, parameters[name].annotation)
        if self.signature(component).accepts_any:
            return ""
        settable = [each for each in parameters if each not in given]
        what, has = f"{component.rpartition('.')[2]} has no argument '{name}'", "It has"
        if not self.given_in.get(f"{prefix}{COMPONENT}"):  # the user has not named the component
            what, has = "is not a setting", f"{prefix.removesuffix('.')} has"
        usual_name = OTHER_NAMES.get(name)
        near = f" Did you mean '{usual_name}'?" if usual_name in settable else did_you_mean(name, settable)
        hint = near.replace("'", f"'{prefix}", 1)
        return f"{what}.{hint or self._place_of(name, [], prefix) or f' {has}: ' + ', '.join(settable)}"

    def _given_by_recipe(self, component: str, default: Values) -> set[str]:
        """Return the arguments of a component that the recipe itself gives, such as an optimizer's parameters."""
        usual = self.signature(default[COMPONENT]) if default else ANYTHING
        given = {name for name, each in usual.parameters.items() if each.default is each.empty and name not in default}
        same = self.signature(component).parameters
        places = [at for at, each in enumerate(usual.positional) if each.name in given and each.name not in same]
        ours = self.signature(component).positional
        return given | {ours[at].name for at in places if at < len(ours) and ours[at].name not in default}

    def _place_of(self, name: str, siblings: Iterable[str], prefix: str) -> str:
        """Where the default has a setting with a name like this."""
        keys = [key for key, value in walk(self.default) if not _is_group(value)]
        if "." in name and prefix + name in keys:
            return f" In a file, nest it: {name.replace('.', ': {')}: ...{'}' * name.count('.')}"
        ours = OTHER_NAMES.get(name, name.rpartition(".")[2]).split()
        same = [key for key in keys if key in ours] or [
            key for key in keys if key != prefix + name and f".{key}".endswith(tuple(f".{each}" for each in ours))
        ]
        near = did_you_mean(name, siblings).replace("'", f"'{prefix}", 1)
        listed = " or ".join(f"'{key}'" for key in same)
        return f" Did you mean {listed}?" if same else near


@functools.cache
def _keys_of_recipes() -> dict[str, set[str]]:
    """Return the settings and groups in the YAML of each recipe."""
    files = {name: find_config(name) for name in list_recipes_with_settings()}
    settings = {name: OmegaConf.to_container(OmegaConf.load(file)) for name, file in files.items()}
    return {name: {key for key, _ in walk(cast(Values, values))} for name, values in settings.items()}


def _is_of_another(key: str) -> bool:
    """Whether only some of the recipes with this setting's group list it: it is for their loops, as `parallel.pp`."""
    group = key.rpartition(".")[0]
    listed = [key in keys for keys in _keys_of_recipes().values() if group in keys]
    return any(listed) and not all(listed)


def _elsewhere(key: str, copy: str) -> str:
    """Which recipes have this setting, and what to do; `copy` is the file name of a copy's defaults."""
    recipes = [name for name, keys in _keys_of_recipes().items() if key in keys]
    if recipes and copy:
        others = ", ".join(recipes)
        return f" {copy} does not have it, only {others}. Add it to {copy} and to its recipe, or leave it out."
    return f" It is one of {', '.join(recipes)}: use that recipe, or leave it out." if recipes else ""


def _is_open(value: Any) -> bool:
    """Whether the value is missing, or taken from another setting."""
    return isinstance(value, str) and (value == "???" or "${" in value)


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)

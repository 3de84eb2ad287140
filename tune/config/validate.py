"""Put a run's settings together and find everything that is wrong with them, in one pass."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from tune.config.conflicts import conflicts
from tune.config.instantiate import COMPONENT
from tune.config.options import Group, Options
from tune.config.paths import find_config, list_recipes
from tune.config.signature import Signature, signature_of
from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.type_check import fits, mismatch, show

Values = dict[str, Any]

# How an optimizer is computed: what one has for sharded parameters another lacks, and each knows its own best.
KERNELS = ("fused", "foreach")


@dataclass(frozen=True)
class Layer:
    """Settings from one place; `origin` is said behind what is wrong with them."""

    values: Values
    origin: str = ""


def combine(default: Layer, layers: Iterable[Layer], imports: bool = True) -> tuple[DictConfig, list[str]]:
    """Merge layers onto the default, later ones win; returns the resolved settings and all that is wrong with them.

    Without `imports` (torch's take seconds), what a component takes is not known: keys and plain values are checked.
    """
    run = _Combination(default.values, [default, *layers], imports)
    values: Values = {}
    for index, layer in enumerate(run.layers):
        known = run.known_keys(index, layer.values, default.values)
        run.mark(index, known)
        values = merge(values, known)
    run.drop_inherited(values)
    cfg = OmegaConf.create(values)
    run.check(cfg, default.values, Options)
    if imports:
        run.check_together(cfg)
    if not run.findings:
        OmegaConf.resolve(cfg)
    return cfg, run.findings


def merge(below: Values, above: Values) -> Values:
    """Both, group by group; a value that both have is that of `above`."""
    merged = below | above
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            merged[name] = merge(below[name], above[name])
    return merged


@dataclass
class _Combination:
    default: Values
    layers: list[Layer]
    imports: bool
    findings: list[str] = field(default_factory=list)
    given_in: dict[str, int] = field(default_factory=dict)  # dotted key -> index of the last layer that touched it
    components: dict[str, str] = field(default_factory=dict)  # dotted key of each _component_ -> its value
    signatures: dict[str, Signature | str] = field(default_factory=dict)  # component -> or why it has none

    def known_keys(self, index: int, values: Values, default: Values, prefix: str = "") -> Values:
        """The part of a layer that has its place in the default; the rest is reported."""
        known: Values = {}
        for name, value in values.items():
            key = f"{prefix}{name}"
            place: Any = default.get(name)
            if name not in default:
                hint = self._place_of(str(name), default, prefix) or _elsewhere(key) or " --help lists all of them."
                problem = f"is not a setting.{hint}"
            elif _is_group(place) and not isinstance(value, dict):
                problem = f"is a group of keys, not the single value {show(value)}. Its keys: {', '.join(place)}."
            elif isinstance(value, dict) and not isinstance(place, dict) and place is not None:
                problem = f"is a single value, not a group of keys ({', '.join(map(str, value))})."
            else:
                descend = _is_group(place) and COMPONENT not in place
                known[name] = self.known_keys(index, value, place, f"{key}.") if descend else value
                continue
            self.findings.append(f"{key}: {problem}{self.layers[index].origin}")
        return known

    def mark(self, index: int, values: Values, prefix: str = "") -> None:
        """Remember which layer gave each key; naming the component that is there already changes nothing."""
        for name, value in values.items():
            key = f"{prefix}{name}"
            if name == COMPONENT and self.components.get(key) == value:
                continue
            if name == COMPONENT:
                self.components[key] = value
            self.given_in[key] = index
            if isinstance(value, dict):
                self.mark(index, value, f"{key}.")

    def drop_inherited(self, values: Values, prefix: str = "") -> None:
        """Where a layer names another component, the arguments from below stay only if that component takes them."""
        for name, group in values.items():
            key = f"{prefix}{name}"
            if _is_group(group) and COMPONENT not in group:
                self.drop_inherited(group, f"{key}.")
            elif _is_group(group):
                named_in = self.given_in[f"{key}.{COMPONENT}"]
                for argument in [each for each in group if self.given_in[f"{key}.{each}"] < named_in]:
                    if argument in KERNELS or not self._takes(str(group[COMPONENT]), argument, group[argument]):
                        del group[argument]

    def check(self, node: DictConfig, default: dict[Any, Any], options: type[Group], prefix: str = "") -> None:
        """Report every missing value, unknown argument, wrong type and interpolation that leads nowhere."""
        kinds = get_type_hints(options, include_extras=True)
        names: list[Any] = list(node)
        for name in names:
            key, place, kind = f"{prefix}{name}", default.get(name), kinds.get(str(name))
            if OmegaConf.is_missing(node, name):
                is_inherited = self.given_in[key] < self.given_in.get(f"{prefix}{COMPONENT}", 0)
                if self.imports or not is_inherited:  # by a component that may not take it
                    self._report(key, f"is missing. Give it on the command line: {key}=...")
                continue
            try:
                value: Any = node[name]
                is_component = isinstance(value, DictConfig) and COMPONENT in value
                if COMPONENT not in node and (is_component or _is_group(place)):
                    inner = kind if isinstance(kind, type) and issubclass(kind, Group) else Group
                    self.check(value, place if isinstance(place, dict) else {}, inner, f"{key}.")
                    continue
                value = OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
            except InterpolationToMissingValueError:
                continue  # what it refers to is reported in its own place
            except OmegaConfBaseException as error:
                self._report(key, f"{str(error).splitlines()[0]}.")
                continue
            if value is None and place is None and name in default:
                continue  # the recipe's own null
            if name == COMPONENT:
                problem = mismatch(value, str) or self._absence(value)
            elif COMPONENT in node:
                problem = self._argument_problem(str(node[COMPONENT]), str(name), value, default, prefix)
                problem = problem or (mismatch(value, kind) if kind else "")
            else:
                problem = mismatch(value, kind or _infer(place))
            if problem:
                self._report(key, problem)

    def check_together(self, cfg: DictConfig) -> None:
        """Report settings that do not go together."""
        for key, problem in conflicts(cfg):
            self._report(key, problem)

    def _report(self, key: str, problem: str) -> None:
        self.findings.append(f"{key}: {problem}{self.layers[self.given_in[key]].origin}")

    def _argument_problem(self, component: str, name: str, value: Any, default: Values, prefix: str) -> str:
        signature = self._signature(component)
        usual = self._signature(default[COMPONENT]) if default else None
        if usual and name not in default and name in usual.parameters and usual.parameters[name].required:
            return "is given by the recipe itself, not in the configuration."
        if signature is None or (signature.accepts_any and name not in signature.parameters):
            return ""
        if name in signature.parameters:
            return mismatch(value, signature.parameters[name].kind)
        hint = did_you_mean(name, signature.parameters) or self._place_of(name, [], prefix)
        title = component.rpartition(".")[2]
        return f"{title} has no argument '{name}'.{hint or ' It has: ' + ', '.join(signature.parameters) + '.'}"

    def _takes(self, component: str, argument: str, value: Any) -> bool:
        signature = self._signature(component)
        if signature is None or argument not in signature.parameters:
            return signature is None or signature.accepts_any
        return _is_open(value) or fits(value, signature.parameters[argument].kind)

    def _signature(self, component: str) -> Signature | None:
        self._absence(component)
        found = self.signatures[component]
        return found if isinstance(found, Signature) else None

    def _absence(self, component: str) -> str:
        """Why there is no such component; empty if there is."""
        if component not in self.signatures:
            try:
                self.signatures[component] = signature_of(component) if self.imports else Signature(accepts_any=True)
            except TuneError as error:
                self.signatures[component] = str(error)
        found = self.signatures[component]
        return found if isinstance(found, str) else ""

    def _place_of(self, name: str, siblings: Iterable[str], prefix: str) -> str:
        """Where the default has a setting with a name like this."""
        keys = _dotted(self.default)
        if "." in name and prefix + name in keys:
            return f" In a file, nest it: {name.replace('.', ': {')}: ...{'}' * name.count('.')}"
        leaf = name.rpartition(".")[2]
        same = [f"'{key}'" for key in keys if key.rpartition(".")[2] == leaf and key != prefix + name]
        return f" Did you mean {' or '.join(same)}?" if same else did_you_mean(name, siblings)


def _elsewhere(key: str) -> str:
    """Which recipes have this setting."""
    recipes = [name for name in list_recipes() if key in OmegaConf.load(find_config(name))]
    return f" {' and '.join(recipes)} has it: use that recipe." if recipes else ""


def _infer(default: Any) -> Any:
    """The type of a setting, from its default; null says nothing about it."""
    return Any if default is None or _is_open(default) else type(default)


def _is_open(value: Any) -> bool:
    """Whether the value is yet to come: missing, or taken from another setting."""
    return isinstance(value, str) and (value == "???" or "${" in value)


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _dotted(values: Values, prefix: str = "") -> list[str]:
    """Every setting's dotted key."""
    keys = []
    for name, value in values.items():
        if name != COMPONENT:
            keys += _dotted(value, f"{prefix}{name}.") if _is_group(value) else [f"{prefix}{name}"]
    return keys

"""Find everything that is wrong with a run's settings, in one pass."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from tune.config.check import fits, infer, is_open, mismatch, show
from tune.config.instantiate import COMPONENT
from tune.config.options import Group, Options
from tune.config.paths import did_you_mean
from tune.config.signature import Signature, signature_of
from tune.errors import TuneError

Values = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """Settings from one place; `origin` is said behind what is wrong with them."""

    values: Values
    origin: str = ""


def combine(default: Layer, layers: Iterable[Layer]) -> tuple[DictConfig, list[str]]:
    """Merge layers onto the default, later ones win; returns the resolved settings and all that is wrong with them."""
    run = _Combination([default, *layers])
    cfg = OmegaConf.create()
    for index, layer in enumerate(run.layers):
        known = run.known_keys(index, layer.values, default.values)
        run.mark(index, known)
        cfg = OmegaConf.merge(cfg, known)  # type: ignore[assignment]
    run.drop_inherited(cfg)
    run.check(cfg, default.values, Options)
    if not run.findings:
        OmegaConf.resolve(cfg)
    return cfg, run.findings


@dataclass
class _Combination:
    layers: list[Layer]
    findings: list[str] = field(default_factory=list)
    given_in: dict[str, int] = field(default_factory=dict)  # dotted key -> index of the last layer that touched it
    components: dict[str, str] = field(default_factory=dict)  # dotted key of each _component_ -> its value
    signatures: dict[str, Signature | str] = field(default_factory=dict)  # component -> or why it has none

    def report(self, key: str, problem: str) -> None:
        self.findings.append(f"{key}: {problem}{self.layers[self.given_in[key]].origin}")

    def known_keys(self, index: int, values: Values, default: Values, prefix: str = "") -> Values:
        """The part of a layer that has its place in the default; the rest is reported."""
        known: Values = {}
        for name, value in values.items():
            key = f"{prefix}{name}"
            place: Any = default.get(name)
            if name not in default:
                problem = f"is not a setting.{self._place_of(str(name), default, prefix)}"
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

    def _place_of(self, name: str, siblings: Iterable[str], prefix: str) -> str:
        """Where the default has a setting with a name like this."""
        keys = _dotted(self.layers[0].values)
        if "." in name and prefix + name in keys:
            return f" In a file, nest it: {name.replace('.', ': {')}: ...{'}' * name.count('.')}"
        leaf = name.rpartition(".")[2]
        same = [f"'{key}'" for key in keys if key.rpartition(".")[2] == leaf and not key.startswith(prefix or ".")]
        return f" Did you mean {' or '.join(same)}?" if same else did_you_mean(name, siblings)

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

    def drop_inherited(self, node: DictConfig, prefix: str = "") -> None:
        """Where a layer names another component, the arguments from below stay only if that component takes them."""
        for name, child in _groups(node):
            key = f"{prefix}{name}"
            if COMPONENT not in child:
                self.drop_inherited(child, f"{key}.")
                continue
            arguments: Values = OmegaConf.to_container(child)  # type: ignore[assignment]
            named_in = self.given_in[f"{key}.{COMPONENT}"]
            inherited = [argument for argument in arguments if self.given_in[f"{key}.{argument}"] < named_in]
            signature = self.signature(str(arguments[COMPONENT])) if inherited else ""
            if isinstance(signature, Signature) and not signature.accepts_any:
                for argument in inherited:
                    value, parameter = arguments[argument], signature.parameters.get(argument)
                    if parameter is None or not (is_open(value) or fits(value, parameter.kind())):
                        del child[argument]

    def signature(self, component: str) -> Signature | str:
        """The signature of a component, or why there is none."""
        if component not in self.signatures:
            try:
                self.signatures[component] = signature_of(component)
            except TuneError as error:
                self.signatures[component] = str(error)
        return self.signatures[component]

    def check(self, node: DictConfig, default: Values, options: type[Group], prefix: str = "") -> None:
        """Report every missing value, unknown argument, wrong type and interpolation that leads nowhere."""
        kinds = get_type_hints(options, include_extras=True)
        groups = {} if COMPONENT in node else dict(_groups(node))
        for name in map(str, node):
            key, place, kind = f"{prefix}{name}", default.get(name), kinds.get(name)
            if name in groups and (COMPONENT in groups[name] or _is_group(place)):
                inner = kind if isinstance(kind, type) and issubclass(kind, Group) else Group
                self.check(groups[name], place if isinstance(place, dict) else {}, inner, f"{key}.")
                continue
            if OmegaConf.is_missing(node, name):
                self.report(key, f"is missing. Give it on the command line: {key}=...")
                continue
            try:
                value = _resolved(node, name)
            except InterpolationToMissingValueError:
                continue  # what it refers to is reported in its own place
            except OmegaConfBaseException as error:
                self.report(key, f"{str(error).splitlines()[0]}.")
                continue
            if value is None and place is None and name in default:
                continue  # the recipe's own null
            if name == COMPONENT:
                signature = self.signature(str(value))
                problem = signature if isinstance(signature, str) else ""
            elif COMPONENT in node:
                problem = self._argument_problem(node, name, value, default, prefix) or (
                    mismatch(value, kind) if kind else ""
                )
            else:
                problem = mismatch(value, kind or infer(place))
            if problem:
                self.report(key, problem)

    def _argument_problem(self, node: DictConfig, name: str, value: Any, default: Values, prefix: str) -> str:
        component = str(node[COMPONENT])
        signature = self.signature(component)
        if isinstance(signature, str):
            return ""
        usual = self.signature(default[COMPONENT]) if default else None
        given = isinstance(usual, Signature) and name not in default and usual.parameters.get(name)
        if given and given.required:
            return "is given by the recipe itself, not in the configuration."
        if parameter := signature.parameters.get(name):
            return mismatch(value, parameter.kind())
        if signature.accepts_any:
            return ""
        hint = did_you_mean(name, signature.parameters) or self._place_of(name, [], prefix)
        title = component.rpartition(".")[2]
        return f"{title} has no argument '{name}'.{hint or ' It has: ' + ', '.join(signature.parameters) + '.'}"


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _groups(node: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    for name in list(node):
        is_open = OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, str(name))
        if not is_open and isinstance(child := node[name], DictConfig):
            yield str(name), child


def _resolved(node: DictConfig, name: str) -> Any:
    value = node[name]
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value


def _dotted(values: Values, prefix: str = "") -> list[str]:
    """Every setting's dotted key."""
    keys = []
    for name, value in values.items():
        if name != COMPONENT:
            keys += _dotted(value, f"{prefix}{name}.") if _is_group(value) else [f"{prefix}{name}"]
    return keys

"""Build the components that a config names with `_component_`."""

import functools
import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from tune.errors import TuneError, explained
from tune.lookup import locate
from tune.types import mismatch

COMPONENT = "_component_"


def instantiate(node: DictConfig | Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call `node._component_` with `args`, the other keys of `node` (as plain lists and dicts), and `kwargs`.

    A key that is a Python keyword goes to the parameter with a trailing underscore: `async` to `async_`. A TuneError of
    the component is prefixed with the key of `node`, or with the argument's key if it begins with an argument's name.
    """
    values: Any = dict(node)
    if isinstance(node, DictConfig):
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    if (path := values.pop(COMPONENT, None)) is None:
        raise TuneError(f"a component needs the key {COMPONENT}, the dotted path of a function or class: {values}")
    component = locate(path)
    key = node._get_full_key(None) if isinstance(node, DictConfig) else ""
    if inspect.isbuiltin(component):
        where = f"{key}.{COMPONENT}: " if key else ""
        raise TuneError(
            f"{where}{path} is a function written in C, which returns a value or acts, but makes no component. Name a "
            "class or a Python function"
        )
    given = {f"{name}_" if keyword.iskeyword(name) else name: value for name, value in values.items()}
    if twice := sorted(given.keys() & kwargs.keys()):
        raise TuneError(f"{key and f'{key}.'}{twice[0]}: the recipe passes this argument to {path}. Leave it out")
    try:
        inspect.signature(component).bind(*args, **given, **kwargs)
    except TypeError as error:
        raise TuneError(f"{key and f'{key}: '}invalid arguments for {path}: {error}") from error
    try:
        made = component(*args, **given, **kwargs)
    except TuneError as error:
        argument = str(error).partition(":")[0].partition(".")[0]
        told = f"{key}.{error}" if key and argument in given else str(error)
        raise TuneError(told if told.startswith(key) else f"{key}: {told}") from error
    except (ValueError, AssertionError) as error:
        if not component.__module__.startswith("torch"):
            raise  # may be a bug in our code or the user's
        raise TuneError(f"{path} refuses these arguments: {error}") from error
    return made


def instantiate_weighted(
    setting: str | list[Any] | dict[str, Any] | ListConfig | DictConfig | None, key: str = "reward"
) -> list[tuple[str, Callable[..., Any], float]]:
    """Return (name, function, weight) for one function of two arguments, or several; weights default to 1.

    Each is a dotted path or a component: a function, which gets the other keys as further arguments, or a class, whose
    instances are called. null gives an empty list. `key` is the key of the setting, for messages.
    """
    found = list[tuple[str, Callable[..., Any], float]]()
    if setting is None:
        return found
    for each in setting if isinstance(setting, ListConfig | list) else [setting]:
        values: Any = {COMPONENT: each} if isinstance(each, str) else each
        if not isinstance(values, Mapping | DictConfig) or not isinstance(values.get(COMPONENT), str):
            raise TuneError(f"{key}: {each} is neither the dotted path of a function nor a group with {COMPONENT}")
        values = OmegaConf.to_container(values, resolve=True) if isinstance(values, DictConfig) else dict(values)
        if problem := mismatch(weight := values.pop("weight", 1), float):
            raise TuneError(
                f"{key}.weight: {problem} It multiplies the values of {values[COMPONENT]}; 0 only logs them"
            )
        with explained(key):
            component = locate(values.pop(COMPONENT))
        name = getattr(component, "__name__", type(component).__name__)
        try:
            is_class, signature = inspect.isclass(component), inspect.signature(component)
            for argument, value in signature.bind(*(() if is_class else (None, None)), **values).arguments.items():
                if argument in values and (problem := mismatch(value, signature.parameters[argument].annotation)):
                    raise TuneError(f"{key}.{argument}: {problem}")
            function: Any = functools.partial(component, **values)
            if is_class:
                with explained(f"{key}: {name} cannot be created", Exception):
                    function = function()
                if not hasattr(function, "scores"):  # a reward model, which scores tokens
                    inspect.signature(function).bind(None, None)
        except (TypeError, ValueError) as error:
            raise TuneError(f"{key}: invalid arguments for {name}: {error}") from error
        if name in [other for other, *_ in found]:
            raise TuneError(f"{key}: two functions have the name {name}, which is their key in the log. Rename one")
        found.append((name, function, weight))
    if found and not any(weight for *_, weight in found):
        raise TuneError(f"{key}: all weights are 0. Set one above 0")
    return found

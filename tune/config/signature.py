"""Signatures of components."""

import inspect
import keyword
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, cast, get_origin

from tune.errors import TuneError
from tune.lookup import locate
from tune.types import Decays, Epsilon, Fraction, Rate, fits

# Arguments that torch's optimizers annotate loosely or not at all, and do not check.
OF_OPTIMIZERS: dict[str, Any] = {
    "lr": Rate,
    "weight_decay": Rate,
    "momentum": Fraction,
    "betas": Decays,
    "eps": Epsilon | list[Epsilon | None],
}


@dataclass
class Signature:
    """The arguments of a component. `async_`, named for a Python keyword, is listed as `async`."""

    parameters: dict[str, inspect.Parameter] = field(default_factory=dict)
    positional: list[inspect.Parameter] = field(default_factory=list, compare=False)  # positional arguments, in order
    accepts_any: bool = False
    problem: str = ""  # why the component cannot be used


def signature_of(path: str) -> Signature:
    """Return the signature of the component with this dotted path, or a `problem` if it cannot be imported."""
    try:
        component = locate(path)
    except TuneError as error:
        return Signature(accepts_any=True, problem=str(error))
    if inspect.isabstract(component):
        kinds = ", ".join(sorted(each.__name__ for each in cast(type[Any], component).__subclasses__()))
        return Signature(accepts_any=True, problem=f"{path} is an abstract class. Use one of {kinds}.")
    return signature(component)


def signature(component: Callable[..., Any]) -> Signature:
    """Return the signature of a function or class; without one, it accepts any argument."""
    try:
        try:
            parameters = inspect.signature(component, eval_str=True).parameters.values()
        except Exception:  # an annotation may only resolve for type checkers
            parameters = inspect.signature(component).parameters.values()
    except (ValueError, TypeError):  # written in C, without a signature
        return Signature(accepts_any=True)
    found = Signature(accepts_any=any(each.kind is each.VAR_KEYWORD for each in parameters))
    kinds = OF_OPTIMIZERS if _is_optimizer(component) else {}
    for each in parameters:
        if each.name in kinds and get_origin(each.annotation) is not Annotated:
            each = each.replace(annotation=kinds[each.name])
        each = each.replace(annotation=optional(each.annotation, each.default))
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            found.positional.append(each)
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            continue
        plain = each.name.removesuffix("_")
        found.parameters[plain if keyword.iskeyword(plain) else each.name] = each
    return found


def optional(annotation: Any, default: Any) -> Any:
    """Return the type of an argument; `size: int = None` also accepts null."""
    return annotation if default is not None or fits(None, annotation) else annotation | None


def _is_optimizer(component: Any) -> bool:
    torch = sys.modules.get("torch")  # a component imported without torch is no optimizer
    return torch is not None and isinstance(component, type) and issubclass(component, torch.optim.Optimizer)

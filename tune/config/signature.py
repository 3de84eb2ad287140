"""The arguments a component takes, and their types."""

import inspect
import keyword
from dataclasses import dataclass, field

from tune.lookup import locate


@dataclass
class Signature:
    """What may be given by name. `async_`, which stands for a Python keyword, is found as `async`."""

    parameters: dict[str, inspect.Parameter] = field(default_factory=dict)
    accepts_any: bool = False
    problem: str = ""  # why the component cannot be used


def signature_of(path: str) -> Signature:
    """The signature of the component with this dotted path, imported; raises TuneError if there is none."""
    component = locate(path)
    try:
        try:
            parameters = inspect.signature(component, eval_str=True).parameters.values()
        except (NameError, SyntaxError, TypeError, AttributeError):  # an annotation that only a type checker can read
            parameters = inspect.signature(component).parameters.values()
    except ValueError:  # written in C, without a signature
        return Signature(accepts_any=True)
    signature = Signature(accepts_any=any(each.kind is each.VAR_KEYWORD for each in parameters))
    for each in parameters:
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            plain = each.name.removesuffix("_")
            signature.parameters[plain if keyword.iskeyword(plain) else each.name] = each
    return signature

"""What follows from the fact that the numbers of a rehearsal, which are made up, are finite.

`torch.isfinite(loss).all()` is true, and so is a guard that is made of it.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

ValueOf = Callable[[Tensor], float | None]

NEVER = {"isnan", "isinf", "isposinf", "isneginf"}
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "mul": operator.mul,
    "logical_and": lambda a, b: bool(a and b),
    "logical_or": lambda a, b: bool(a or b),
    "bitwise_and": lambda a, b: bool(a and b),
    "bitwise_or": lambda a, b: bool(a or b),
}
# Operations on tensors of one value whose results have the same value.
KEEPING = {
    *("all", "any", "amin", "amax", "min", "max", "mean", "prod", "clone", "detach", "alias"),
    *("view", "reshape", "squeeze", "unsqueeze", "expand", "select", "slice", "index"),
    *("index_select", "contiguous", "t", "transpose", "permute", "flatten", "lift_fresh"),
    *("_to_copy", "_unsafe_view", "_local_scalar_dense"),
}


def value_if_finite(name: str, args: Sequence[Any], result: Tensor, values: ValueOf) -> float | None:
    """Return the value of all elements of an operation's result, if it follows from finite inputs.

    `values` gives the value of all elements of a tensor, if it is known.
    """
    if name in NEVER:
        return False
    if name == "isfinite":
        return True
    if name in OF_TWO:
        return _of_two(name, args[0], args[1], values)
    value = values(args[0]) if args and isinstance(args[0], Tensor) else None
    if value is None:
        return None
    if name in ("logical_not", "bitwise_not"):
        return not value
    if name in ("sum", "count_nonzero"):
        return float(value) * args[0].numel() / max(1, result.numel())
    return value if name in KEEPING else None


def _of_two(name: str, a: Any, b: Any, values: ValueOf) -> float | None:
    first, second = (values(part) if isinstance(part, Tensor) else part for part in (a, b))
    # x == x, which is false only for NaN.
    if name in ("eq", "ne") and a is b and first is None:
        return name == "eq"
    # All finite numbers compare with an infinite one as 0 does.
    if first is None and isinstance(b, float) and math.isinf(b) and name != "mul":
        first = 0.0
    if first is None or second is None:
        return None
    value: float = OF_TWO[name](first, second)
    return value

"""Types that carry a range: for annotating settings and the arguments of components."""

from collections.abc import Callable
from math import inf
from typing import Annotated, NamedTuple


class Range(NamedTuple):
    """What numbers it has; `description` reads on from "0 is not ..."."""

    description: str
    has: Callable[[float], bool]


PositiveInt = Annotated[int, Range("a positive integer", lambda x: x >= 1)]
NonNegativeInt = Annotated[int, Range("a non-negative integer", lambda x: x >= 0)]
PositiveFloat = Annotated[float, Range("a positive number", lambda x: 0 < x < inf)]
NonNegativeFloat = Annotated[float, Range("a non-negative number", lambda x: 0 <= x < inf)]
Fraction = Annotated[float, Range("a number from 0 to below 1", lambda x: 0 <= x < 1)]
StepsOrFraction = NonNegativeInt | Fraction
UnitInterval = Annotated[float, Range("a number from 0 to 1", lambda x: 0 <= x <= 1)]
Epochs = Annotated[float, Range("a number above 0 and up to a million", lambda x: 0 < x <= 1e6)]
Share = Annotated[float, Range("a number above 0 and up to 1", lambda x: 0 < x <= 1)]

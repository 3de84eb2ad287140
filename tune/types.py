"""Types that carry a range: for annotating settings and the arguments of components."""

from dataclasses import dataclass
from math import inf
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """`minimum <= x <= maximum` and `above < x < below`; `description` reads on from "0 is not ..."."""

    description: str
    minimum: float = -inf
    maximum: float = inf
    above: float = -inf
    below: float = inf

    def __contains__(self, number: float) -> bool:
        return self.minimum <= number <= self.maximum and self.above < number < self.below


PositiveInt = Annotated[int, Range("a positive integer", minimum=1)]
NonNegativeInt = Annotated[int, Range("a non-negative integer", minimum=0)]
PositiveFloat = Annotated[float, Range("a positive number", above=0)]
NonNegativeFloat = Annotated[float, Range("a non-negative number", minimum=0)]
Fraction = Annotated[float, Range("a number from 0 to below 1", minimum=0, below=1)]
StepsOrFraction = NonNegativeInt | Fraction
UnitInterval = Annotated[float, Range("a number from 0 to 1", minimum=0, maximum=1)]
Share = Annotated[float, Range("a number above 0 and up to 1", above=0, maximum=1)]

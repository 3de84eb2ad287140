"""What the field has learned the hard way, as rules: settings that work together and still ruin a run, or end it late.

A new rule is an entry of the table `RULES`, and a case in tests/rules. The entry point of a recipe applies them when it
has read the settings, and `tune validate` for the machine that is named.
"""

from collections.abc import Collection

from tune.rules.combinations import COMBINATIONS
from tune.rules.rule import Facts, Finding, Level, Rule
from tune.rules.table import TABLE

RULES = [*TABLE, *COMBINATIONS]
"""All rules, in the order of docs/validate.md: first those that have a source, then those of this library alone."""


def judge(facts: Facts, strict: bool = False, wrong: Collection[str] = ()) -> list[Finding]:
    """Return what the rules find, see `Rule.judge`. For settings that are `wrong` no layout is planned."""
    wrong = {*wrong, "parallel.auto"} if wrong else wrong
    return [finding for rule in RULES if (finding := rule.judge(facts, strict, wrong))]

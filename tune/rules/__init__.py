"""Rules about combinations of settings that ruin a run or end it late.

Add a rule as an entry of `RULES`, with a case in tests/rules. A recipe's entry point applies the rules after it reads
the settings. `tune validate` applies them for the machine that it is given.
"""

from collections.abc import Collection

from tune.rules.combinations import COMBINATIONS
from tune.rules.rule import Facts, Finding, Level, Rule
from tune.rules.table import TABLE

RULES = [*TABLE, *COMBINATIONS]
"""All rules, in the order of docs/validate.md: first rules with an upstream source, then rules of this library."""


def judge(facts: Facts, strict: bool = False, wrong: Collection[str] = ()) -> list[Finding]:
    """Return the findings of all rules, see `Rule.judge`. With `wrong` settings, no layout is planned."""
    wrong = {*wrong, "parallel.auto"} if wrong else wrong
    return [finding for rule in RULES if (finding := rule.judge(facts, strict, wrong))]


def unchecked(facts: Facts, renamed: Collection[str]) -> tuple[int, list[str]]:
    """Return the number of rules that read settings `renamed` or deleted in a copy, and the names of those settings."""
    count, names = 0, set[str]()
    for rule in RULES:
        facts.asked.clear()
        rule.when(facts)
        if missing := facts.asked & {*renamed}:
            count += 1
            names |= missing
    return count, sorted(names)

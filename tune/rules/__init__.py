"""What the field has learned the hard way, as rules: settings that work together and still ruin a run, or end it late.

A new rule is an entry of a table, and a case in tests/rules: `COMBINATIONS` has those that follow from the settings
alone and are applied whenever settings are read, `RULES` those that a run applies when it begins, and `tune validate`.
"""

from tune.rules.combinations import COMBINATIONS
from tune.rules.rule import Facts, Finding, Level, Rule
from tune.rules.table import RULES


def judge(facts: Facts, strict: bool = False) -> list[Finding]:
    """What the rules find; settings that a rule heals are changed in `facts.cfg`, unless `strict`, which makes each of
    these an error."""
    return [finding for rule in RULES if (finding := rule.judge(facts, strict))]

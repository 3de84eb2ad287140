"""What the field has learned the hard way, as rules: settings that work together and still ruin a run, or end it late.

A new rule is an entry of `RULES`, and a case in tests/rules. A run applies them when it begins, `tune validate` before.
"""

from tune.rules.rule import Facts, Finding, Level, Rule
from tune.rules.table import RULES


def judge(facts: Facts, strict: bool = False) -> list[Finding]:
    """What the rules find; settings that a rule heals are changed in `facts.cfg`, unless `strict`, which makes each of
    these an error."""
    return [finding for rule in RULES if (finding := rule.judge(facts, strict))]

"""What the field has learned the hard way, as rules: settings that work together and still ruin a run, or end it late.

A new rule is an entry of `SETTINGS` (what follows from the settings and the machine) or of `MODELS` (what follows from
the model's files too), and a case in tests/rules. A run applies them when it begins, `tune validate` before.
"""

from tune.rules.models import MODELS
from tune.rules.rule import Facts, Finding, Level, Rule
from tune.rules.settings import SETTINGS

__all__ = ["RULES", "Facts", "Finding", "Level", "Rule", "judge"]

RULES = [*SETTINGS, *MODELS]
"""All of them, in the order of `docs/validate.md`."""


def judge(facts: Facts, strict: bool = False) -> list[Finding]:
    """What the rules find; settings that a rule heals are changed in `facts.cfg`, unless `strict`, which makes each of
    these an error."""
    return [finding for rule in RULES if (finding := rule.judge(facts, strict))]

"""Print `tune validate` errors of command lines for several processes, and other findings of rules. This needs a
separate process: pytest's may be in a process group of one."""

import json
import sys

from tune import config
from tune.cli.recipes import recipe_of
from tune.validate.checks import validate

found = []
for recipe, *settings in json.loads(sys.argv[2]):
    read = config.read(*recipe_of(recipe, settings))
    findings = validate(config.find_recipe(recipe), *read, processes=int(sys.argv[1]))
    asked_for = "layout-that-is-planned"  # by the command line itself
    wrong = [each for each in findings if each.level == "error" or each.rule not in ("", asked_for)]
    found.append("\n".join(map(str, wrong)))
print(json.dumps(found))

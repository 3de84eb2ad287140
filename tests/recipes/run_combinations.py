"""Runs recipes in one process group, one after the other: `run_combinations.py JSON`, a list of recipe, output folder
and settings. A TuneError, with which a recipe refuses the settings, is written to a file beside the folder."""

import json
import sys
from pathlib import Path

from run_variants import run_variants

from tune.errors import TuneError

for recipe, output, settings in json.loads(sys.argv[1]):
    folder = Path(output)
    try:
        run_variants(recipe, folder.parent, settings, {folder.name: []})
    except TuneError as error:
        folder.with_suffix(".refused").write_text(str(error))

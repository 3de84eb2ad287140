"""Run recipes one after another in one process group: `run_combinations.py JSON`.

JSON is a list of recipe, output folder and settings. A TuneError is written to a file next to the folder.
"""

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

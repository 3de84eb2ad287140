"""Runs full_finetune several times in one process group: `run_variants.py OUTPUT COMMON_JSON VARIANTS_JSON`."""

import json
import sys
from pathlib import Path

from tune import config

sys.path.insert(0, str(config.find_recipe("full_finetune").parent))
import full_finetune

if __name__ == "__main__":
    output, common, variants = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    for name, overrides in variants.items():
        cfg = config.load("full_finetune", [*common, *overrides, f"output_dir={output / name}"])
        full_finetune.main(cfg)

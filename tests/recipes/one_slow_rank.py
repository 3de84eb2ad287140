"""Run a recipe in several layouts with one slow rank: `one_slow_rank.py OUTPUT COMMON VARIANTS RANK`."""

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from recipes.run_variants import run_variants

output, common, variants, slow = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
norm = nn.RMSNorm.forward


def delayed(*args, **kwargs):
    if dist.get_rank() == slow:
        time.sleep(0.02)
    return norm(*args, **kwargs)


nn.RMSNorm.forward = delayed
for recipe in ("full_finetune", "pipeline_finetune"):
    chosen = {name: more for name, more in variants.items() if ("parallel.pp=" in str(more)) == ("pipe" in recipe)}
    run_variants(recipe, output, common, chosen)

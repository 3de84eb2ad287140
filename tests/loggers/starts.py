"""A script for `torchrun --max-restarts 1`: its processes tell of their folders, and fail at the first start."""

import os
import sys
from pathlib import Path

from tune import config, distributed
from tune.errors import TuneError
from tune.loggers import Run, run_folder

world = distributed.init("cpu")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
cfg = config.load("full_finetune", ["model.path=m", "dataset.path=d", "resume=never"])
run = Run("mine", world, cfg.output_dir, cfg.resume, settings=cfg)
if world.is_main:
    print(f"start {attempt}: {run.path} resume={run.resume}", flush=True)
    (run.path / "checkpoints" / "step-00000001").mkdir(parents=True, exist_ok=True)
world.barrier()
if attempt == "0":
    sys.exit(1)

run_folder.PATIENCE = 0.5
os.makedirs(f"node-{world.rank}/runs", exist_ok=True)
os.chdir(f"node-{world.rank}")
try:
    Run("mine", world, "runs/apart", settings=cfg)
except TuneError as error:
    print(f"rank {world.rank}: {error}", flush=True)
assert not [*Path("runs").glob("apart/.*")]

"""A script for `torchrun --max-restarts 1`: its processes record their folders and fail at the first start."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from omegaconf import OmegaConf

from tune import config, distributed
from tune.errors import TuneError
from tune.run import Run, run_folder

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

# One file per process: lines of two processes may mix in a shared output.
report, messages = Path(f"told-{world.rank}.txt").absolute(), []
run_folder.PATIENCE = 0.5
os.makedirs(f"node-{world.rank}/runs", exist_ok=True)
os.chdir(f"node-{world.rank}")
for folder in (f"{__file__}/run", "runs/apart"):
    try:
        Run("mine", world, folder, settings=cfg)
    except TuneError as error:
        messages.append(str(error))


# Different files on each node: the settings name the same path on both.
def refusal(**others: object) -> str:
    settings = OmegaConf.merge(cfg, others)
    try:
        Run("mine", world, str(Path.cwd().parent / "together"), settings=settings)
    except TuneError as error:
        return str(error)
    return ""


Path("model").mkdir()
Path("model/model.safetensors").write_bytes(bytes(10**6))
Path("model/README.md").write_text(f"rank {world.rank}")
assert refusal(model={"path": "model"}) == ""
Path("rows.jsonl").write_text(f"row {world.rank}")
messages.append(refusal(dataset={"path": "rows.jsonl"}))
if world.rank:
    Path("model/model.safetensors").write_bytes(b"1" * 10**6)  # the same size, like an older copy
messages.append(refusal(model={"path": "model"}))
if world.rank:
    Path("rows.jsonl").unlink()
messages.append(refusal(dataset={"validation": "rows.jsonl"}))
assert not [*Path("runs").glob("apart/.*")]
try:
    run._require_same_data(SimpleNamespace(fingerprint=world.rank), None)
except TuneError as error:
    messages.append(str(error))
run._require_same_data(SimpleNamespace(fingerprint="equal"), None)
report.write_text("\n".join(messages))

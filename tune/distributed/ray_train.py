"""Report checkpoints to Ray Train from a worker that runs the recipe."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def is_ray_worker() -> bool:
    return "TUNE_RAY_WORKER" in os.environ and "ray.train" in sys.modules


def report(step: int, metrics: Mapping[str, float], checkpoint: Path, has_it: bool) -> None:
    """Report a checkpoint and the metrics of its step; the checkpoint stays in the run folder. All workers must call
    this. It takes up to 2 seconds."""
    from ray import train
    from ray.train import Checkpoint, CheckpointUploadMode

    found = Checkpoint.from_directory(str(checkpoint.absolute())) if has_it else None
    train.report({**metrics, "step": step}, found, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

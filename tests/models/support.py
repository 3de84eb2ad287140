"""Test what each family supports and print the table of docs/support.md: `PYTHONPATH=tests python
tests/models/support.py`.

Layouts are tested with torch's fake process group of two ranks: the model is sharded on the meta device, and an
unsupported layout raises its error.
"""

import copy
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from models.test_families import GEMMA3, MISTRAL3, QWEN3_5, SMALL, VARIANTS
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune import distributed
from tune.convert.to_gguf import ARCHITECTURES
from tune.errors import TuneError
from tune.models import build
from tune.models.families import supported
from tune.peft import LoRA, add_adapters

WITH_IMAGES = {
    "gemma3": ("Gemma3Config", GEMMA3),
    "mistral3": ("Mistral3Config", MISTRAL3),
    "qwen3_5": ("Qwen3_5Config", QWEN3_5),
}
AXES = ("dp_shard", "tp", "cp", "ep", "pp")


def save(family, folder):
    import transformers

    if family == "kimi_k2":  # transformers has no such class; it is DeepSeek-V3 under another name
        saved = (save("deepseek_v3", folder) / "config.json").read_text()
        (folder / "config.json").write_text(saved.replace('"deepseek_v3"', '"kimi_k2"'))
        return folder
    kind, fields = WITH_IMAGES.get(family) or (VARIANTS[family][0], SMALL | VARIANTS[family][1])
    getattr(transformers, kind)(**fields).save_pretrained(folder)
    return folder


def is_refused(action):
    try:
        action()
    except TuneError:
        return True
    return False


def supported_by(family, folder):
    """Return which columns of the table the family supports, given a small model of it in `folder`."""
    with torch.device("meta"):
        model = build(str(folder))
    row = {}
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    for axis in AXES:
        if axis == "ep" and not has_experts:
            continue
        world = distributed.init("cpu", **{axis: 2})
        row[axis] = not is_refused(lambda world=world: distributed.require_layout(model, world, "fp32", "fp32"))
    row["LoRA"] = not is_refused(lambda: add_adapters(copy.deepcopy(model), LoRA(rank=4)))
    if has_experts:
        of_experts = LoRA(rank=4, target_modules=r".*\.experts.*")
        row["LoRA of experts"] = not is_refused(lambda: add_adapters(model, of_experts))
    row["GGUF"] = family in ARCHITECTURES
    return row


@contextmanager
def two_ranks():
    """A fake process group of two ranks; only this rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def table():
    """The lines of the Markdown table, one per family."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder, two_ranks():
        for family in supported():
            rows[family] = supported_by(family, save(family, Path(folder) / family))
    columns = list(rows["mixtral"])
    lines = [f"| `model_type` | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for family, row in rows.items():
        cells = {True: "yes", False: "no", None: ""}
        lines.append(f"| `{family}` | {' | '.join(cells[row.get(column)] for column in columns)} |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")

"""Write docs/cards.md: which model fits which card, by `tune plan`.

    python docs/cards_page.py            writes docs/cards.md, in about 10 minutes of one core
    python docs/cards_page.py --shapes   only writes the models' config.json files, below shapes/, in no time

The plans need no weights, so the shapes are written here: they are the published values of each config.json.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tune import config
from tune.cli.plan import without_data
from tune.devices import DEVICES
from tune.errors import TuneError
from tune.plan import Job

PAGE = Path(__file__).parent / "cards.md"
SHAPES = Path("shapes")
LENGTHS = (2048, 8192)  # tokens of a row

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN = LLAMA | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
}


class Model(NamedTuple):
    """A model's size in the table, its name, and its config.json."""

    size: str
    name: str
    shape: dict[str, object]


def model(size: str, name: str, common: dict[str, object], *values: int, **others: object) -> Model:
    shape = common | dict(zip(FIELDS, values, strict=True)) | others
    return Model(size, name, shape)


MODELS = (
    model("1B", "Llama-3.2-1B", LLAMA, 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    model("3B", "Llama-3.2-3B", LLAMA, 3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True),
    model("8B", "Llama-3.1-8B", LLAMA, 4096, 14336, 32, 32, 8, 128256),
    model("14B", "Qwen3-14B", QWEN, 5120, 17408, 40, 40, 8, 151936),
    model("32B", "Qwen3-32B", QWEN, 5120, 25600, 64, 64, 8, 151936),
    model("70B", "Llama-3.1-70B", LLAMA, 8192, 28672, 80, 64, 8, 128256),
)

IN_BF16 = "compute.master_dtype=bf16"
METHODS = {
    "full": ("full_finetune",),
    "full, 8-bit": ("full_finetune", "optimizer._component_=torchao.optim.AdamW8bit", IN_BF16),
    "LoRA": ("lora_finetune",),
    "QLoRA": ("lora_finetune", "--config", "qlora"),
}


class Card(NamedTuple):
    """A column of the table."""

    title: str
    device: str
    number: int = 1


CARDS = (
    Card("12 GiB", "rtx3060"),
    Card("16 GiB", "rtx4080"),
    Card("24 GiB", "rtx4090"),
    Card("48 GiB", "l40s"),
    Card("80 GiB", "h100"),
    Card("8 x 80 GiB", "h100", 8),
)

# What a cell tries, cheapest first: its mark in the table, and its settings of a layout (`compute.` in the command).
STEPS: dict[str, dict[str, object]] = {
    "": {"activation_checkpointing": "none"},
    "s": {"activation_checkpointing": "selective"},
    "f": {"activation_checkpointing": "full"},
    "a": {"activation_checkpointing": "full", "activation_offload": True},
    "c": {"activation_checkpointing": "full", "cpu_offload": True},
}


class Cell(NamedTuple):
    """The first step that fits a card, or else the one that needs the least; GiB and tokens/s are of one card."""

    fits: bool
    gib: float
    host_gib: float
    speed: float
    mark: str
    command: str

    def __str__(self) -> str:
        if not self.fits:
            return "-"
        return f"{self.gib:.1f} {self.mark}".strip()

    @property
    def line(self) -> str:
        """The command, and what it answers."""
        answer = [] if self.fits else ["does not fit"]
        answer.append(f"{self.gib:.1f} GiB")
        if self.host_gib > 1:
            answer.append(f"{self.host_gib:.0f} GiB of the host")
        if self.fits:
            answer.append(f"{float(f'{self.speed:.2g}'):,.0f} tokens/s")
        return f"{self.command}  # {', '.join(answer)}"


HEADER = """# Which model on which card

After reading this page you know which models you can fine-tune on your card, how, and with which
command. A cell is the memory of one card in GiB; "-" does not fit.

| mark | settings that make it fit |
|---|---|
| none | none: activations are kept |
| s | `compute.activation_checkpointing=selective` |
| f | `compute.activation_checkpointing=full`: the backward pass computes blocks again |
| a | f and `compute.activation_offload=true`: kept activations are in host memory |
| c | f and `compute.cpu_offload=true`: weights, gradients and states are in host memory. Slow |

A cell has the first of these that fits, with 200 GiB of host memory for each card. A micro-batch
is one full row, and a step has 16 rows. All else is the default of the recipe:

| method | trains |
|---|---|
| full | `full_finetune`: all parameters; weights and AdamW's states in fp32 |
| full, 8-bit | the same with torchao's AdamW8bit, on one card with weights in bf16: less precise |
| LoRA | `lora_finetune`: adapters of rank 16 on all linear layers but the head |
| QLoRA | `lora_finetune --config qlora`: the same, with the base in 4 bits |

The models are {models}. The cards are
{cards}. On 8 x 80 GiB, FSDP shards the model.
"""

WORTH = """
## What an estimate is worth

None of this was measured on such a card. For each cell, `tune plan` ran the recipe to the end of
its first step, on tensors without memory, and counted. A sum includes 1 GiB for CUDA and libraries
and 5% for fragments. Plans were compared with torch's memory tracker and with single runs on GPUs
([planning](planning.md#how-accurate-it-is)). If a cell is within 5% of the card, try it with
`max_steps=3`. Shorter rows need less. [A run that does not
fit](planning.md#a-run-that-does-not-fit) prints what would help.

## The commands

A plan needs only the model's `config.json`. From the top of a clone, this writes them to `shapes/`:

```
python docs/cards_page.py --shapes
```

Then you can paste any line below. To train what it plans, replace `tune plan` by `tune run`, the
shape by the model's folder, drop `--device`, write `--nproc-per-node 8` for `--world-size 8`, and
add `dataset.path`. The tokens per second of one card are estimates too: trust their ratios.

`python docs/cards_page.py` wrote this page, in {minutes} minutes of one core.
"""


def page(lines: list["Row"], minutes: float) -> str:
    """Return the text of docs/cards.md."""
    models = ", ".join(name for _, name, _ in MODELS)
    cards = ", ".join(f"{card.device} ({card.title})" for card in CARDS if card.number == 1)
    text = HEADER.format(models=models, cards=cards)
    for tokens in LENGTHS:
        text += f"\n## Rows of {tokens:,} tokens\n\n| model | |{'|'.join(f' {card.title} ' for card in CARDS)}|\n"
        text += "|---" * (2 + len(CARDS)) + "|\n"
        text += "".join(f"{row}\n" for row in lines if row.tokens == tokens)
    text += WORTH.format(minutes=round(minutes))
    for size, name, _ in MODELS:
        text += f"\n### {size}: {name}\n\n```text\n"
        for row in lines:
            if row.name == name:
                text += f"# {row.method}, rows of {row.tokens:,} tokens\n"
                text += "".join(f"{cell.line}\n" for cell in row.cells)
        text += "```\n"
    return text


def write_shapes(folder: Path) -> None:
    """Write FOLDER/NAME/config.json for each model."""
    for _, name, shape in MODELS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")


def cell(shapes: Path, name: str, method: str, tokens: int, card: Card) -> Cell:
    """Plan a model on a card, in this process, as the cell's command does."""
    recipe, *settings = METHODS[method]
    if card.number > 1 and IN_BF16 in settings:
        settings.remove(IN_BF16)  # torchao's optimizers do not update bf16 shards
    settings += [f"max_seq_len={tokens}"]
    device = DEVICES[card.device]

    # One row at a time, and what costs the least time first. A step that a rule refuses is left
    # out: torchao's optimizers do not update bf16 weights on the host.
    plans = {}
    for mark, step in STEPS.items():
        memory = [f"compute.{key}={str(value).lower()}" for key, value in step.items()]
        try:
            cfg = without_data(recipe, [*settings, *memory, f"model.path={shapes / name}"])
        except TuneError:
            continue
        if not plans:
            job = Job(cfg, device, card.number, config.find_recipe(recipe))
        plans[mark] = job.plan(replace(job.layout(), **step))
        if plans[mark].fits:
            break
    else:
        mark = min(plans, key=lambda mark: plans[mark].share)

    # The preset of QLoRA recomputes blocks, so a command states all of its step.
    memory = [f"compute.{key}={str(value).lower()}" for key, value in STEPS[mark].items()]
    words = ["tune plan", recipe, *settings, f"model.path={SHAPES / name}", *memory]
    words += [f"--world-size {card.number} --device {card.device}"]
    plan = plans[mark]
    speed = plan.as_dict()["tokens_per_second"]
    return Cell(plan.fits, plan.peak / 2**30, plan.host / 2**30, speed, mark, " ".join(words))


class Row(NamedTuple):
    """A line of a table."""

    size: str
    name: str
    method: str
    tokens: int
    cells: list[Cell]

    def __str__(self) -> str:
        return f"| {self.size} | {self.method} | {' | '.join(map(str, self.cells))} |"


def rows() -> Iterator[Row]:
    """Yield the lines of all tables."""
    with tempfile.TemporaryDirectory() as folder:
        write_shapes(Path(folder))
        for tokens in LENGTHS:
            for size, name, _ in MODELS:
                for method in METHODS:
                    cells = [cell(Path(folder), name, method, tokens, card) for card in CARDS]
                    row = Row(size, name, method, tokens, cells)
                    print(f"{tokens} {row}", flush=True)
                    yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", action="store_true", help="only write the config.json files")
    if parser.parse_args().shapes:
        write_shapes(SHAPES)
        return
    lines = list(rows())
    PAGE.write_text(page(lines, time.process_time() / 60), encoding="utf-8")


if __name__ == "__main__":
    main()

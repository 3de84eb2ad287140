"""Tensor parallelism: unsupported sizes are reported before anything is loaded."""

import re
from pathlib import Path

import pytest
import torch
from helpers import result_of, run_processes, save_checkpoint
from models.test_families import SMALL, VARIANTS

from tune import distributed
from tune.distributed import tensor_parallel
from tune.distributed.parallelize import repeated_blocks, units_of
from tune.errors import TuneError
from tune.models import build
from tune.quantization import quantize_linears

transformers = pytest.importorskip("transformers")


class Mesh:
    """The mesh of one of `processes` processes; the others do not exist."""

    def __init__(self, processes):
        self.processes = processes

    def size(self):
        return self.processes

    def get_local_rank(self):
        return 0

    def get_group(self):
        return distributed.init("cpu").mesh["tp"].get_group()


def model_of(folder, name, **changes):
    kind, others = VARIANTS[name]
    getattr(transformers, kind)(**SMALL | others | changes).save_pretrained(folder)
    with torch.device("meta"):
        return build(str(folder))


WRONG = [
    ("llama", {}, 3, "3 does not divide num_heads=4, num_kv_heads=2 of this model. Set it to 1 or 2 or 4"),
    ("llama", {}, 8, "8 does not divide num_heads=4 of this model. Set it to 1 or 2 or 4"),
    ("llama", {"intermediate_size": 98}, 4, "does not divide size=98 of this model. Set it to 1 or 2"),
    ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, 2,
     "does not divide num_kv_heads=3 of this model. Set it to 1 or 3 or 6"),
    ("phi3", {}, 3, "num_heads=4, num_kv_heads=2"),
    ("gpt_oss", {"intermediate_size": 50}, 4, "size=50"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 30}, 4, "size=30"),
    ("qwen3_moe", {"moe_intermediate_size": 9}, 2, "size=9 of this model. Set it to 1"),
    ("deepseek_v3", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}, 4, "num_heads=6"),
    ("qwen3_5_text", {"linear_num_value_heads": 6}, 4, "num_value_heads=6 of this model. Set it to 1 or 2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "processes", "message"), WRONG)
def test_unsupported_sizes_are_rejected(name, changes, processes, message, tmp_path):
    model = model_of(tmp_path, name, **changes)
    with pytest.raises(TuneError, match=r"^parallel\.tp: ") as refusal:
        share(model, processes)
    assert message in str(refusal.value)
    assert not any(isinstance(parameter, torch.distributed.tensor.DTensor) for parameter in model.parameters())


@pytest.mark.slow
def test_unsupported_sizes_are_reported_before_the_run(chats, tmp_path, told_to):
    for name, changes, processes, message in WRONG:
        folder = checkpoint_of(tmp_path / f"{name} {processes} {len(changes)}", name, **changes)
        (output,) = told_to(processes, line_of(folder, chats, f"parallel.tp={processes}"))
        assert message in output


def checkpoint_of(folder, name, **changes):
    """Save a checkpoint with weights and a tokenizer."""
    kind, others = VARIANTS[name]
    return save_checkpoint(folder, kind, **SMALL | {"vocab_size": 300} | others | changes)


def line_of(folder, chats, *settings):
    common = [
        f"model.path={folder}",
        f"dataset.path={chats}",
        f"output_dir={folder / 'run'}",
        "max_seq_len=64",
    ]
    return ["full_finetune", *common, "device=cpu", "compute.dtype=fp32", *settings]


def share(model, processes):
    blocks = repeated_blocks(model)
    tensor_parallel.share(model, blocks, units_of(model, blocks), Mesh(processes))


def test_nf4_blocks_are_not_split(tmp_path):
    model = model_of(tmp_path, "llama", intermediate_size=256)
    with torch.device("meta"):
        quantize_linears(model)
    with pytest.raises(TuneError, match=r"2 does not divide the 64 inputs .* blocks of 64"):
        share(model, 2)


@pytest.mark.slow
def test_saved_activations_match_the_docs(tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 8}
    save_checkpoint(tmp_path, num_hidden_layers=4, max_position_embeddings=2048, **shape)
    script = Path(__file__).with_name("saved_between_parts.py")
    text = (Path(distributed.__file__).parents[2] / "docs" / "layouts.md").read_text()
    for size, checkpointing in ((2, "none"), (4, "none"), (2, "full"), (4, "full")):
        kept = float(run_processes(script, 1, str(tmp_path), str(size), checkpointing).splitlines()[-1])
        assert re.search(rf"\| {checkpointing} \| {size} \| [\d,]+ \| {kept:,.0f} \|", text), (
            size,
            checkpointing,
            kept,
        )
        if checkpointing == "full":
            assert kept == pytest.approx(4 * 256 * 4 / size, rel=0.01)  # the input of each of 4 blocks


@pytest.mark.slow
def test_sent_sizes_match_the_docs(checkpoint):
    sent = result_of(run_processes(Path(__file__).with_name("count_collectives.py"), 1, str(checkpoint), "tp", "2"))
    layers, tokens, hidden = 3, 120, 64
    gathered = reduced = 4 * layers * tokens * hidden
    assert sent["numbers"] == {
        "all_gather_into_tensor.default": gathered + 2 * tokens * hidden,
        "reduce_scatter_tensor.default": reduced,
        "all_reduce.default": 2 * tokens * hidden + 2 * layers * hidden,
    }
    assert sent["calls"] == {
        "all_gather_into_tensor.default": 4 * layers + 2,
        "reduce_scatter_tensor.default": 4 * layers,
        "all_reduce.default": 2 + 2 * layers,
    }
    text = (Path(distributed.__file__).parents[2] / "docs" / "layouts.md").read_text()
    rows = re.findall(
        r"^\| .* \| (?:2 L )?T D \| \d+ \| ([\d,]+) \|", text.split("## Tensor")[1].split("## Con")[0], re.M
    )
    assert sum(int(row.replace(",", "")) for row in rows) == gathered + reduced + 4 * tokens * hidden

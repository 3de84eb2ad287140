"""The student of examples/distillation."""

import importlib.util
from pathlib import Path

import torch
from helpers import save_checkpoint
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).parents[2] / "examples" / "distillation" / "halve.py"


def test_student_has_every_second_block(tmp_path):
    spec = importlib.util.spec_from_file_location("distill_example", SCRIPT)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    whole = save_checkpoint(tmp_path / "whole", num_hidden_layers=5)
    example.halve(whole, tmp_path / "half")
    teacher, student = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("whole", "half"))
    teacher.model.layers = teacher.model.layers[::2]
    for index, layer in enumerate(teacher.model.layers):
        layer.self_attn.layer_idx = index
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert_close(student(tokens).logits, teacher(tokens).logits)
    assert student.config.num_hidden_layers == 3

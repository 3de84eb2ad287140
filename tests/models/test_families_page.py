"""docs/families.md: its table is complete and its example of a custom family works unchanged."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from tune import config
from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.models import families

transformers = pytest.importorskip("transformers")

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text()


@pytest.fixture
def my_family(tmp_path, monkeypatch):
    """Write the module of the page where a recipe can import it."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(code.splitlines()) < 40
    (tmp_path / "my_family.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))


def nimbus(folder, **fields):
    """Save a SmolLM3 that behaves like the Nimbus of the page, with the names of the page."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "sliding_window": 8, "initializer_range": 0.1, "tie_word_embeddings": False,
    }  # fmt: skip
    twin = {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "rope_parameters": {"rope_theta": 50000.0}}
    theirs = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**shape, **twin, pad_token_id=None)).eval()
    renamed = {
        "model.embed_tokens": "tokens", "model.layers": "layers", "input_layernorm": "norm_1", "self_attn": "attn",
        "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "post_attention_layernorm": "norm_2",
        "mlp": "ffn", "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "model.norm": "final_norm",
        "lm_head": "unembed",
    }  # fmt: skip
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in renamed.items():
            name = re.sub(rf"(^|\.){re.escape(old)}(?=\.)", rf"\1{new}", name)
        tensors[name] = tensor.clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(shape | {"model_type": "nimbus"} | fields))
    return theirs


def test_custom_family(my_family, tmp_path):
    theirs = nimbus(tmp_path / "Nimbus")
    with torch.device("meta"):
        model = config.instantiate({"_component_": "my_family.build", "path": str(tmp_path / "Nimbus")})
    assert model.names.on_disk["blocks.1.attention.query.weight"] == "layers.1.attn.q.weight"
    ours = load_model(str(tmp_path / "Nimbus"))
    tokens = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1))
    assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_unread_fields_of_a_custom_family_are_refused(my_family, tmp_path):
    nimbus(tmp_path / "Nimbus", sliding_every=2, thunder=True)
    with pytest.raises(TuneError, match="thunder=True"):
        config.instantiate({"_component_": "my_family.build", "path": str(tmp_path / "Nimbus")})


def test_table_names_every_family():
    rows = re.findall(r"^\| (`.*?) \|", PAGE, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"model_type"}
    assert named == set(families.supported())

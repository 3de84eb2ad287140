"""Adapters in your own training loop: custom networks and optimizers, transformers models, files read by PEFT."""

import json
from pathlib import Path

import own_loop
import pytest
import torch
import torch.nn.functional as F
from helpers import make_adapter, result_of, run_processes
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.peft import (
    LoRA,
    LoRALinear,
    adapted_modules,
    adapter_state_dict,
    add_adapters,
    export_adapter,
    load_adapter,
    merge_in_place,
    read_adapter,
)
from tune.quantization import quantize_linears

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


class Encoder(nn.Module):
    """Not a language model: torch's attention, which reads its output projection without calling it, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(32, 3)

    def forward(self, hidden):
        return self.classifier(self.encoder(hidden).mean(dim=1))


INPUTS, TARGETS = torch.randn(8, 5, 32, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
DORA = LoRA(rank=4, alpha=8, dora=True, rank_stabilized=True)
KINDS = {
    "all linear": LoRA(rank=4, alpha=8, modules_to_save=["classifier"]),
    "dora": DORA,
    "patterns": LoRA(rank=4, alpha=8, target_modules=["linear1", "linear2"], rank_pattern={"linear2": 2}),
    "pissa": LoRA(rank=4, alpha=8, init="pissa", target_modules=["linear1"]),
}


def loaded_by_peft(folder):
    """Load the adapter in training mode: in evaluation, torch's encoder layers would use the weights of the base."""
    return peft.PeftModel.from_pretrained(Encoder(), folder).train()


def train(model, steps=3):
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.02)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(INPUTS), TARGETS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_custom_network_is_adapted_trained_exported_and_loaded_by_peft(kind, tmp_path):
    model, before = Encoder(), Encoder()(INPUTS)
    names = set(add_adapters(model, KINDS[kind]).layers)
    assert not any("out_proj" in name for name in names)
    assert_close(model(INPUTS), before, atol=1e-5, rtol=1e-5)
    losses = train(model)
    assert losses[-1] < losses[0]
    export_adapter(model, tmp_path / "adapter")
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "written.json"
    ]  # fmt: skip
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["task_type"] is None
    theirs = loaded_by_peft(tmp_path / "adapter")
    assert_close(theirs(INPUTS), model(INPUTS), atol=1e-5, rtol=1e-5)
    again = Encoder()
    add_adapters(again, read_adapter(tmp_path / "adapter"))
    load_adapter(again, tmp_path / "adapter")
    assert_close(again(INPUTS), model(INPUTS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match_peft(kind, tmp_path):
    model = Encoder()
    add_adapters(model, KINDS[kind])
    train(model, steps=1)
    export_adapter(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(Encoder(), tmp_path / "adapter", is_trainable=True)
    for network in (model, theirs):
        F.cross_entropy(network(INPUTS), TARGETS).backward()
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    ours = {f"base_model.model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    if kind != "pissa":  # PEFT stores it with twice the rank
        assert sum(map(torch.Tensor.numel, ours.values())) == sum(map(torch.Tensor.numel, gradients.values()))
    for name, gradient in ours.items():
        if "lora_" in name and kind == "all linear":
            theirs_name = name.replace("lora_a", "lora_A.weight").replace("lora_b", "lora_B.weight")
            assert_close(gradient, gradients[theirs_name], atol=1e-6, rtol=1e-4)


def test_state_dict_matches_peft(tmp_path):
    model = Encoder()
    add_adapters(model, KINDS["all linear"])
    train(model)
    export_adapter(model, tmp_path / "adapter", task_type="FEATURE_EXTRACTION")
    theirs = peft.PeftModel.from_pretrained(Encoder(), tmp_path / "adapter")
    expected = peft.get_peft_model_state_dict(theirs)
    assert_close(adapter_state_dict(model), dict(expected), rtol=0, atol=0)
    assert_close(load_file(tmp_path / "adapter/adapter_model.safetensors"), dict(expected), rtol=0, atol=0)
    assert theirs.peft_config["default"].task_type == "FEATURE_EXTRACTION"


@pytest.mark.parametrize("kind", KINDS)
def test_merging_in_memory_matches_peft(kind, tmp_path):
    model = Encoder()
    add_adapters(model, KINDS[kind])
    train(model)
    export_adapter(model, tmp_path / "adapter")
    with torch.no_grad():
        expected = model.eval()(INPUTS)
    merge_in_place(model)
    assert not adapted_modules(model) and not any(isinstance(module, LoRALinear) for module in model.modules())
    merged = peft.PeftModel.from_pretrained(Encoder(), tmp_path / "adapter").merge_and_unload()
    state = {name.replace("modules_to_save.default.", ""): tensor for name, tensor in merged.state_dict().items()}
    assert_close(model.state_dict(), {name: state[name] for name in model.state_dict()}, atol=1e-5, rtol=1e-5)
    assert model.state_dict().keys() == Encoder().state_dict().keys()
    assert_close(model(INPUTS), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(TuneError, match="no adapter to merge"):
        merge_in_place(model)
    add_adapters(model, LoRA(rank=2))  # like on any plain model
    assert_close(model(INPUTS), expected, atol=1e-5, rtol=1e-5)


def test_merging_into_quantized_weights_is_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)))
    quantize_linears(model)
    add_adapters(model, LoRA(rank=2))
    with pytest.raises(TuneError, match=r"0\.0 is quantized"):
        merge_in_place(model)
    assert adapted_modules(model)


def test_dropout_without_a_batch_uses_torch():
    model = Encoder()
    add_adapters(model, LoRA(rank=4, dropout=0.5, target_modules=["linear1"]))
    layer = model.encoder.layers[0].linear1
    nn.init.normal_(layer.lora_b)
    torch.manual_seed(3)
    output = layer(INPUTS)
    torch.manual_seed(3)
    low_rank = F.linear(F.linear(F.dropout(INPUTS, 0.5), layer.lora_a), layer.lora_b) * layer.scaling
    assert_close(output, F.linear(INPUTS, layer.weight, layer.bias) + low_rank)


def test_adapters_on_other_layers_keep_the_first_ones():
    model = Encoder()
    add_adapters(model, LoRA(rank=4, target_modules=["linear1"]))
    train(model)
    before, first = model(INPUTS), adapter_state_dict(model)
    add_adapters(model, LoRA(rank=2, target_modules=["linear2"]))
    assert_close(model(INPUTS), before)
    after = adapter_state_dict(model)
    assert len(after) == 2 * len(first)
    assert_close({name: after[name] for name in first}, first, rtol=0, atol=0)
    train(model)
    changed = adapter_state_dict(model)
    assert all(not torch.equal(changed[name], after[name]) for name in after)


def test_layers_with_two_ranks_are_loaded_by_peft(tmp_path):
    model = Encoder()
    add_adapters(model, LoRA(rank=4, alpha=4, target_modules=["linear1"]))
    add_adapters(model, LoRA(rank=2, alpha=16, target_modules=["linear2"]))
    train(model)
    export_adapter(model, tmp_path / "adapter")
    theirs = loaded_by_peft(tmp_path / "adapter")
    assert_close(theirs(INPUTS), model(INPUTS), atol=1e-5, rtol=1e-5)
    add_adapters(model, LoRA(rank=2, dora=True, target_modules=["classifier"]))
    with pytest.raises(TuneError, match=r"one dora for all layers.*False, True"):
        export_adapter(model, tmp_path / "other")


@pytest.mark.parametrize("target", ["all-linear", ["linear1"]])
def test_adapting_a_layer_twice_is_refused(target):
    model = Encoder()
    add_adapters(model, LoRA(rank=4, target_modules=["linear1"]))
    before = model(INPUTS)
    with pytest.raises(TuneError, match=r"layers\.0\.linear1 already has an adapter"):
        add_adapters(model, LoRA(rank=4, target_modules=target))
    assert_close(model(INPUTS), before)


def test_layer_that_is_never_called_is_refused_by_name():
    with pytest.raises(TuneError, match=r"self_attn\.out_proj is never called"):
        add_adapters(Encoder(), LoRA(target_modules=["out_proj"]))


def test_peft_model_is_refused():
    theirs = peft.get_peft_model(Encoder(), peft.LoraConfig(target_modules=["linear1"]))
    for model in (theirs, theirs.base_model.model):
        with pytest.raises(TuneError, match="of the library peft"):
            add_adapters(model, LoRA(rank=4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 9.0}, r"alpha=8, rank=4.*alpha=9, rank=4"),
        ({"rank_stabilized": True}, "rank_stabilized=False.*rank_stabilized=True"),
        ({"dora": True}, "dora=False.*dora=True"),
    ],
)
def test_adapter_with_another_scaling_is_refused(changes, message, tmp_path):
    model = Encoder()
    settings = {"rank": 4, "alpha": 8.0, "target_modules": ["linear1"]}
    add_adapters(model, LoRA(**settings))
    export_adapter(model, tmp_path / "adapter")
    other = Encoder()
    add_adapters(other, LoRA(**settings | changes))
    with pytest.raises(TuneError, match=message):
        load_adapter(other, tmp_path / "adapter")


def test_export_overwrites_neither_other_files_nor_the_base(tmp_path, checkpoint):
    model = Encoder()
    with pytest.raises(TuneError, match="no adapter to export"):
        export_adapter(model, tmp_path / "adapter")
    add_adapters(model, LoRA(rank=4))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(TuneError, match=r"notes\.txt"):
        export_adapter(model, tmp_path / "mine")
    assert (tmp_path / "mine/notes.txt").read_text() == "mine"
    base = make_adapter(checkpoint, tmp_path / "written", 0)  # a folder that may be replaced
    with pytest.raises(TuneError, match="is the base"):
        export_adapter(model, base, base=base)


def test_adapter_of_a_language_model_names_base_and_task(checkpoint, tmp_path):
    model = load_model(str(checkpoint))
    add_adapters(model, LoRA(rank=4))
    export_adapter(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["task_type"]) == (str(checkpoint), "CAUSAL_LM")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    tokens = torch.arange(5, 25)[None]
    assert_close(theirs(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_transformers_model_is_adapted_and_trained_by_its_trainer(checkpoint, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    add_adapters(model, LoRA(rank=4, dropout=0.1, target_modules=["q_proj", "v_proj"]))
    rows = [{"input_ids": list(range(3, 23)), "labels": list(range(3, 23))} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        tmp_path / "trainer", max_steps=3, per_device_train_batch_size=4, learning_rate=0.05, report_to="none",
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    before = adapter_state_dict(model)
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert not all(torch.equal(tensor, before[name]) for name, tensor in adapter_state_dict(model).items())
    export_adapter(model, tmp_path / "adapter")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    tokens = torch.arange(5, 25)[None]
    assert_close(theirs(tokens).logits, model.eval()(tokens).logits, atol=1e-5, rtol=1e-5)
    merge_in_place(model)
    model.save_pretrained(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert_close(merged(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_custom_fsdp_on_two_processes_trains_like_one_process(tmp_path):
    losses = result_of(run_processes(Path(own_loop.__file__), 2, str(tmp_path / "adapter")))
    model = own_loop.Net()
    add_adapters(model, LoRA(rank=4, modules_to_save=["head"]))
    assert losses == pytest.approx(own_loop.train(model, slice(None)), rel=1e-5)
    theirs = peft.PeftModel.from_pretrained(own_loop.Net(), tmp_path / "adapter")
    assert_close(theirs(own_loop.INPUTS), model(own_loop.INPUTS), atol=1e-4, rtol=1e-4)

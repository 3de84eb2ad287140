"""Adapters of models of images and text are exchanged with PEFT, whose names are those in memory."""

import pytest
import torch
from stacked_experts import NoTokenizer

from tune import distributed
from tune.checkpointers import Pretrained, export, plain_tensors
from tune.errors import TuneError
from tune.models import hf
from tune.peft import LoRA, add_adapters, export_adapter, load_adapter, merge
from tune.peft.files import read_adapter

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")

from vision import FAMILIES, batch_of, inputs_of, pictures_of, save  # noqa: E402

WHOLE = transformers.AutoModelForImageTextToText
FAMILY = [pytest.param(name, marks=() if name == "qwen2_5_vl" else pytest.mark.slow) for name in FAMILIES]


def load(folder, lora, **settings):
    with torch.device("meta"):
        model = hf(str(folder), **settings)
    added = add_adapters(model, lora)
    weights = Pretrained(str(folder), model)
    distributed.parallelize(model, distributed.init("cpu"), dtype="fp32")
    weights.load(model)
    return model, added


def changed(model):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def assert_equal(logits, expected):
    assert (logits - expected).norm() <= 3e-5 * expected.norm()


def run(model, name):
    documents = [inputs_of(name, "What is in this image?", 1, 2)]
    with torch.no_grad():
        if isinstance(model, torch.nn.Module) and hasattr(model, "names"):
            return model(batch_of(documents, pictures_of(documents)))
        return model.eval()(**documents[0]).logits


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("parts", [None, ["language", "projector", "tower"]], ids=["language", "all"])
def test_our_adapter_in_peft_and_merged(name, parts, tmp_path, recwarn):
    base = save(name, tmp_path / "base")
    settings = {"modules_to_save": ["mm_soft_emb_norm"]} if name == "gemma3" and parts else {}
    model, added = load(base, LoRA(rank=2, **settings), parts=parts)
    adapted = {model.part_of(each) for each in added.layers}
    assert adapted == ({"language"} if parts is None else {*parts} - ({"projector"} if name == "gemma3" else set()))
    changed(model)
    logits = run(model, name)
    export_adapter(model, tmp_path / "adapter", world=distributed.init("cpu"), base=str(base), tokenizer=NoTokenizer())
    recwarn.clear()
    whole = WHOLE.from_pretrained(base)
    assert (run(whole, name) - logits).abs().max() > 1e-3
    theirs = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    assert not any("adapter keys" in str(warning.message) for warning in recwarn)
    assert_equal(run(theirs, name), logits)
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert_equal(run(WHOLE.from_pretrained(tmp_path / "merged"), name), logits)


@pytest.mark.parametrize("name", FAMILY)
def test_peft_adapter_in_our_model(name, tmp_path):
    base = save(name, tmp_path / "base")
    whole = WHOLE.from_pretrained(base)
    linears = [each for each, module in whole.named_modules() if isinstance(module, torch.nn.Linear)]
    config = peft.LoraConfig(r=2, target_modules=[each for each in linears if "head" not in each])
    theirs = peft.get_peft_model(whole, config)
    for each, parameter in theirs.named_parameters():
        if "lora" in each:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    model, added = load(base, read_adapter(tmp_path / "adapter"))
    assert {"language", "tower"} <= {model.part_of(each) for each in added.layers}
    load_adapter(model, tmp_path / "adapter")
    assert_equal(run(model, name), run(theirs, name))


def test_parts_that_get_adapters(tmp_path):
    base = save("llava", tmp_path)
    model, added = load(base, LoRA(rank=2, target_modules=["q_proj", "v_proj"]))  # names of layers in the tower too
    assert len(added.layers) == 4 and {model.part_of(each) for each in added.layers} == {"language"}
    _, added = load(base, LoRA(rank=2, target_modules=["q_proj", "linear_1"]), parts=["language", "projector"])
    assert len(added.layers) == 3
    _, added = load(base, LoRA(rank=2, target_modules=r".*vision_tower.*q_proj"))
    assert len(added.layers) == 3
    with pytest.raises(TuneError, match=r"linear_1.*projector.*model\.parts"):
        load(base, LoRA(rank=2, target_modules=["linear_1"]))
    with pytest.raises(TuneError, match=r"projector.*model\.parts"):
        load(base, LoRA(rank=2, target_modules=["q_proj"]), parts=["language", "projector"])


@pytest.mark.parametrize("name", FAMILY)
def test_trained_model_in_transformers(name, tmp_path):
    """A step of all parts, exported; the names on disk are as found."""
    base = save(name, tmp_path / "base")
    with torch.device("meta"):
        model = hf(str(base), parts=["language", "projector", "tower"])
    weights = Pretrained(str(base), model)
    distributed.parallelize(model, distributed.init("cpu"), dtype="fp32")
    weights.load(model)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    logits = run(model, name)
    export(model, NoTokenizer(), tmp_path / "model", distributed.init("cpu"), source=str(base))
    exported = WHOLE.from_pretrained(tmp_path / "model")
    assert_equal(run(exported, name), logits)
    assert not torch.equal(run(WHOLE.from_pretrained(base), name), logits)
    names = [{tensor.name for tensor in plain_tensors(folder).values()} for folder in (base, tmp_path / "model")]
    assert names[0] == names[1]
    assert (tmp_path / "model" / "processor_config.json").exists()

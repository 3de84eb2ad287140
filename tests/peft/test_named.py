"""Models, adapters and runs named on the command line are opened and give the logits of PEFT."""

import json
import shutil

import pytest
import torch
from helpers import make_adapter, save_checkpoint
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.models import Decoder
from tune.models.hf import HuggingFaceModel
from tune.peft import adapter, merge, open_model, resolve_model
from tune.quantization import NF4Weight

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(5, 85).view(2, 40)


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    """Two adapters with different but overlapping layers."""
    folder = tmp_path_factory.mktemp("adapters")
    first = make_adapter(checkpoint, folder / "first", 1)
    return first, make_adapter(checkpoint, folder / "second", 2, target_modules=["q_proj", "down_proj", "embed_tokens"])


@pytest.mark.slow
@torch.no_grad()
def test_several_adapters_add_up_as_in_peft(checkpoint, adapters):
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = peft.PeftModel.from_pretrained(base, adapters[0], adapter_name="first").eval()
    opened = open_model(adapters[0])
    model, tokenizer = opened.load(), opened.tokenizer()
    assert_close(model(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)
    assert_close(open_model(checkpoint, adapters=adapters[:1]).load()(TOKENS), model(TOKENS))
    assert tokenizer.path == adapters[0]

    theirs.load_adapter(adapters[1], adapter_name="second")
    theirs.base_model.set_adapter(["first", "second"])
    opened = open_model(adapters[0], adapters=[adapters[1]])
    both, tokenizer = opened.load(), opened.tokenizer()
    assert_close(both(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)
    assert (both(TOKENS) - model(TOKENS)).abs().max() > 1e-3
    assert tokenizer.path == adapters[1] and not both.training


@pytest.mark.slow
@torch.no_grad()
def test_two_dora_adapters_add_up_as_in_peft(checkpoint, adapters, tmp_path):
    folders = [make_adapter(checkpoint, tmp_path / str(seed), seed, dora=True) for seed in (3, 4)]
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = peft.PeftModel.from_pretrained(base, folders[0], adapter_name="first").eval()
    theirs.load_adapter(folders[1], adapter_name="second")
    theirs.base_model.set_adapter(["first", "second"])
    assert_close(
        open_model(folders[0], adapters=folders[1:]).load()(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5
    )


@pytest.mark.slow
def test_adapters_that_set_the_same_parameters_are_not_combined(checkpoint, adapters, tmp_path):
    """Only one of them could have an effect. PEFT refuses two heads and two rows of a token, too."""
    head = make_adapter(checkpoint, tmp_path / "head", 3, modules_to_save=["lm_head"])
    norm = make_adapter(checkpoint, tmp_path / "norm", 3, modules_to_save=["norm"])
    rows = make_adapter(checkpoint, tmp_path / "rows", 4, trainable_tokens={"embed_tokens": [5, 6]})
    more = make_adapter(checkpoint, tmp_path / "more", 5, trainable_tokens={"embed_tokens": [6, 7]})
    others = make_adapter(checkpoint, tmp_path / "others", 6, trainable_tokens={"embed_tokens": [8]})
    plain = adapters[0]

    for first, second in ((head, head), (rows, more), (rows, rows)):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        theirs = peft.PeftModel.from_pretrained(theirs, first, adapter_name="first")
        theirs.load_adapter(second, adapter_name="second")
        with pytest.raises(ValueError):
            theirs.base_model.set_adapter(["first", "second"])
    for first, second, facts in (
        (head, head, "lm_head"), (head, plain, "lm_head"), (plain, head, "lm_head"), (head, norm, "lm_head"),
        (rows, more, "token 6"), (more, rows, "token 6"), (rows, rows, "token 5"),
    ):  # fmt: skip
        ways = (
            lambda pair=(first, second): open_model(checkpoint, pair).load(),
            lambda pair=(first, second): open_model(pair[0], pair[1:]).load(),
            lambda pair=(first, second): merge(checkpoint, pair, tmp_path / "out", method="linear"),
        )
        for combine in ways:
            with pytest.raises(TuneError, match=facts) as error:
                combine()
            assert str(first) in str(error.value) or str(second) in str(error.value)
    with pytest.raises(TuneError, match="token 5"):  # of the first and the third
        open_model(checkpoint, [rows, others, rows]).load()
    tokens = torch.arange(5, 13)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for folder in (rows, others):  # PEFT merges one after the other, but cannot activate both
        theirs = peft.PeftModel.from_pretrained(theirs, folder).merge_and_unload().eval()
    for pair in ((rows, others), (others, rows)):
        assert_close(open_model(checkpoint, pair).load()(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_dora_below_another_adapter(checkpoint, adapters, tmp_path):
    dora = make_adapter(checkpoint, tmp_path / "dora", 3, dora=True)
    both = open_model(dora, adapters=[adapters[0]]).load()(TOKENS)
    merged = load_model(str(checkpoint))
    for name, layer in open_model(dora).load().named_modules():
        if hasattr(layer, "magnitude"):
            merged.get_submodule(name).weight.data = layer.merged(layer.weight).detach()
    difference = open_model(adapters[0]).load().state_dict()
    for name, layer in merged.named_modules():
        if f"{name}.lora_a" in difference:
            layer.weight.data += 2 * difference[f"{name}.lora_b"] @ difference[f"{name}.lora_a"]
    assert_close(both, merged(TOKENS), atol=1e-5, rtol=1e-5)


def test_run_folders_resolve_to_their_exports(checkpoint, adapters, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model: {path: somewhere}\n")
    shutil.copytree(adapters[0], run / "adapter")
    resolved = resolve_model(run)
    assert (resolved.base, resolved.adapters, resolved.tokenizer) == (checkpoint, (run / "adapter",), run / "adapter")
    assert resolve_model(checkpoint, [run]).adapters == (run / "adapter",)
    shutil.copytree(checkpoint, run / "model")  # with the adapter merged in, as export.merge=true leaves it
    assert resolve_model(run) == resolve_model(run / "model")
    assert resolve_model(run).adapters == ()


def test_types_and_quantization(checkpoint, adapters, tmp_path):
    halved = tmp_path / "bf16"
    transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(halved)
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, halved)
    types = {name: open_model(halved).load(**options).norm.weight.dtype for name, options in {
        "on a CPU": {}, "of the file": {"device": "meta"}, "chosen": {"dtype": "fp16"},
    }.items()}  # fmt: skip
    assert types == {"on a CPU": torch.float32, "of the file": torch.bfloat16, "chosen": torch.float16}
    model = open_model(adapters[0]).load(quantization="nf4")
    assert isinstance(model.blocks[0].attention.query.weight, NF4Weight)
    expected = open_model(adapters[0]).load()(TOKENS)
    assert 0 < (model(TOKENS) - expected).norm() / expected.norm() < 0.3


def test_families_open_natively_or_through_transformers(checkpoint, tmp_path):
    """Native families are Decoders; others are loaded through transformers."""
    assert isinstance(open_model(checkpoint).load(), Decoder)
    folder = save_checkpoint(tmp_path / "gptj", "GPTJConfig", n_embd=64, n_layer=2, n_head=4, rotary_dim=8)
    model = open_model(folder).load()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert isinstance(model, HuggingFaceModel)
    assert_close(model(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_paths_that_are_not_models_are_refused(checkpoint, adapters, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000050").mkdir(parents=True)
    (run / "config.yaml").touch()
    moved, scores, empty = tmp_path / "moved", tmp_path / "scores", tmp_path / "empty"
    shutil.copytree(adapters[0], moved)
    settings = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "org/base"}))
    shutil.copytree(checkpoint, scores)
    config = json.loads((scores / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "x"}}
    (scores / "config.json").write_text(json.dumps(config))
    empty.mkdir()
    (tmp_path / "model.gguf").touch()
    wrong = [
        ((run,), r"not exported anything yet.*but step-00000050.*output_dir=.*run, continues"),
        ((run / "checkpoints" / "step-00000050",), "not exported anything yet"),
        ((tmp_path / "not_there",), "does not exist"),
        (("org/name",), "tune download org/name"),
        ((tmp_path / "model.gguf",), "tune convert"),
        ((checkpoint / "config.json",), "is a file; it must be a model"),
        ((empty,), r"neither a model \(config.json\), nor an adapter .* it has nothing"),
        ((moved,), r"is an adapter of org/base, .* BASE --adapter .*moved"),
        ((checkpoint, [checkpoint]), "is not an adapter: it has no adapter_config.json"),
        ((checkpoint, [run]), "not exported anything yet"),
    ]
    for named, message in wrong:
        with pytest.raises(TuneError, match=message):
            resolve_model(*named)
    (run / "model").mkdir()
    for folder in (run / "checkpoints", run / "checkpoints" / "step-00000050"):
        with pytest.raises(TuneError) as caught:
            resolve_model(folder)
        assert f"{run} --step 50" in str(caught.value) and str(run / "checkpoints/step-00000050") in str(caught.value)
    with pytest.raises(TuneError, match="is a reward model"):
        open_model(scores)
    with pytest.raises(TuneError, match="support only one adapter"):
        open_model(adapters[0], adapters=[adapters[1]]).load(quantization="nf4")


def test_missing_run_is_reported_with_the_nearest_path_and_without_a_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "triage").mkdir(parents=True)
    with pytest.raises(TuneError, match="'runs/triage'") as caught:
        open_model("runs/triag")
    assert "model.path" not in str(caught.value) and "a run folder" in str(caught.value)
    with pytest.raises(TuneError, match=r"^model\.path: runs/triag .*'runs/triage'"):
        open_model("runs/triag", setting="model.path")


@pytest.mark.parametrize(("given", "expected"), [({}, 0.25), ({"dropout": None}, 0.25), ({"dropout": 0.0}, 0.0)])
def test_dropout_of_a_continued_adapter(given, expected, checkpoint, tmp_path):
    """0 is a value; only null leaves the adapter's own."""
    folder = make_adapter(checkpoint, tmp_path / "adapter", seed=0, dropout=0.25)
    assert adapter(str(folder), **given).dropout == expected
    assert adapter(**given).dropout == 0.0

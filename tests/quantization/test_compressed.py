"""Quantized folders match compressed-tensors, and transformers loads them with the expected logits."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import run_verbs, save_checkpoint, slow_but
from recipes.test_rewards import reward_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.cli import main
from tune.collators import Batch
from tune.losses import score
from tune.quantization import nf4
from tune.quantization.compressed import dequantize, quantize
from tune.tokenizers import Tokenizer

pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import fake_quantize  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402

KINDS = ("int8", "int4", "fp8")
REAL = Path(__file__).parents[2] / ".demo" / "smollm2-135m"


def rounded(model: nn.Module, kind: str, group: int | None) -> nn.Module:
    """Quantize and dequantize the weights of the blocks of `model`."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and "." in name:
            weight = layer.weight.data
            pair = quantize(weight, kind, group or layer.in_features) if kind != "nf4" else nf4.quantize(weight)
            layer.weight.data = dequantize(*pair) if kind != "nf4" else nf4.dequantize(*pair, torch.float32)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["LlamaConfig", "Phi3Config", "Qwen2Config"])
def test_transformers_loads_quantized_folders(kind: str, family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", family, pad_token_id=None, tie_word_embeddings=family == "Qwen2Config")
    main(["quantize", str(folder), "--to", kind, "--out", str(tmp_path / "out")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens, plain = torch.arange(80).view(2, 40), load_model(str(folder))
    with torch.no_grad():
        before = plain(tokens)
        expected, actual = rounded(plain, kind, 64 if kind == "int4" else None)(tokens), theirs(tokens).logits
    assert (expected - before).abs().max() > 1e-3
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert Tokenizer(str(tmp_path / "out")).vocabulary == Tokenizer(str(folder)).vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_output_of_libraries_is_not_shown(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """In a new process, in which libraries have not printed their warnings yet."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    (made, _) = run_verbs(["quantize", str(checkpoint), "--to", kind, "--out", str(tmp_path / "out")], ["ls"])
    assert (made.returncode, made.stderr) == (0, "")


def test_head_of_a_reward_model_is_not_quantized(tmp_path: Path) -> None:
    reward_model(tmp_path / "model")
    main(["quantize", str(tmp_path / "model"), "--to", "int8", "--out", str(tmp_path / "out")])
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    plain, tokens = load_model(str(tmp_path / "model"), head="score"), torch.arange(40)[None] + 3
    before = score(plain, Batch.of(tokens))
    expected, scores = score(rounded(plain, "int8", None), Batch.of(tokens)), theirs.eval()(tokens).logits[:, 0]
    assert (expected - before).abs().max() > 1e-4
    assert_close(scores, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mxfp4", "nf4"])
def test_transformers_unpacks_the_same_weights(kind: str, tmp_path: Path) -> None:
    """On a CPU, transformers multiplies packed 4-bit weights in bf16; its unpacked weights are compared in fp32."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    folder = save_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    main(["quantize", str(folder), "--to", kind, "--out", str(tmp_path / "out")])
    dtype = torch.float32 if kind == "nf4" else torch.bfloat16
    theirs, packed = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).eval() for _ in range(2)
    )
    tokens, plain = torch.arange(80).view(2, 40), load_model(str(folder))
    with torch.no_grad():
        in_four_bits = packed(tokens).logits.float()
        theirs = theirs.dequantize() if kind == "nf4" else packed  # its forward has unpacked the weights
        actual = nn.Module.float(theirs)(tokens).logits
        before = plain(tokens)
        for name, layer in rounded(plain, kind, 32).named_modules():
            if isinstance(layer, nn.Linear) and "." in name:
                assert torch.equal(theirs.get_submodule(plain.names.module(name)).weight, layer.weight), name
        for parameter in plain.parameters():
            parameter.data = parameter.to(dtype).float()
        expected = plain(tokens)
    assert (expected - before).abs().max() > 0.3
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert_close(in_four_bits, expected, atol=0.1, rtol=0)


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
TEXT = SIZES | {"num_key_value_heads": 1, "vocab_size": 400, "head_dim": 32}
VISION = SIZES | {"image_size": 28, "patch_size": 14}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
QWEN = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "rope_parameters": ROPE} | DELTA
TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
TOWER |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
READS_IMAGES = {
    "gemma3": ("Gemma3", TEXT, VISION, {"mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3", TEXT | {"model_type": "mistral"}, VISION | {"model_type": "pixtral"}, {}),
    "qwen3_5": ("Qwen3_5", TEXT | QWEN, TOWER, {}),
}


def reads_images(family: str, folder: Path) -> tuple[Path, type]:
    """Save a small model of a `family` that also reads images."""
    name, text, vision, others = READS_IMAGES[family]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **others)
    save_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    model_class._from_config(config).save_pretrained(folder)
    return folder, model_class


QUICK = {("gemma3", "int8"), ("qwen3_5", "int4")}


@pytest.mark.parametrize("names", ["new", "old"])
@pytest.mark.parametrize(("family", "kind"), slow_but(QUICK, itertools.product(READS_IMAGES, (*KINDS, "nf4"))))
def test_image_towers_are_not_quantized(family: str, kind: str, names: str, tmp_path: Path) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    folder, model_class = reads_images(family, tmp_path / "model")
    plain = model_class.from_pretrained(folder, dtype=torch.float32)
    if names == "old":  # as google/gemma-3-4b-it is published
        if family == "qwen3_5":
            pytest.skip("its checkpoints have one way to name tensors")
        pairs = {"model.language_model.": "language_model.model.", "model.": ""}
        renamed = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            prefix = next((each for each in pairs if name.startswith(each)), "")
            renamed[pairs.get(prefix, "") + name.removeprefix(prefix)] = tensor
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    main(["quantize", str(folder), "--to", kind, "--out", str(tmp_path / "out")])
    theirs, info = model_class.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    tower = [name for name, _ in plain.named_parameters() if "language_model" not in name and "lm_head" not in name]
    assert len(tower) > 8
    for name in tower:
        assert torch.equal(theirs.get_parameter(name), plain.get_parameter(name)), name
    for name, layer in plain.named_modules():
        if isinstance(layer, nn.Linear) and "language_model" not in name:  # another class could not compute with them
            assert type(theirs.get_submodule(name)) is type(layer), name
    layers = theirs.model.language_model.layers
    packed = [layer for layer in layers.modules() if isinstance(layer, nn.Linear) and is_packed(layer)]
    assert len(packed) == len([layer for layer in layers.modules() if isinstance(layer, nn.Linear)]) > 0


def is_packed(layer: nn.Linear) -> bool:
    stored = [*dict(layer.named_parameters()), *dict(layer.named_buffers())]
    return "weight_packed" in stored or "weight_scale" in stored or layer.weight.dtype == torch.uint8


@pytest.mark.parametrize("family", ["Falcon", "Mamba"])
def test_result_that_transformers_cannot_open_is_not_written(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = save_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 400}
    sizes |= {"num_attention_heads": 4} if family == "Falcon" else {"pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**sizes, bos_token_id=1, eos_token_id=2)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    with pytest.raises(SystemExit, match="2"):
        main(["quantize", str(folder), "--to", "int8", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert "wrote" not in printed.out and "error: transformers" in printed.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_transformers_also_quantizes_inputs(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """The reference is our model with rounded weights and layer inputs rounded with the library's scales."""
    main(["quantize", str(checkpoint), "--to", kind, "--dynamic", "--out", str(tmp_path / "out")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    group = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    inputs = QuantizationArgs(**group["input_activations"])
    plain, tokens = rounded(load_model(str(checkpoint)), kind, None), torch.arange(80).view(2, 40)

    def quantized(layer: nn.Module, arguments: tuple[Tensor]) -> Tensor:
        scale, zero = calculate_qparams(
            arguments[0].amin(-1, keepdim=True), arguments[0].amax(-1, keepdim=True), inputs
        )
        return fake_quantize(arguments[0], scale, zero, inputs)

    with torch.no_grad():
        before = plain(tokens)
        for name, layer in plain.named_modules():
            if isinstance(layer, nn.Linear) and "." in name:
                layer.register_forward_pre_hook(quantized)
        expected, actual = plain(tokens), theirs(tokens).logits
    assert (expected - before).abs().max() > 1e-3
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_torchao_accepts_the_tensors(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    make = {"int8": torchao.Int8Tensor, "fp8": torchao.Float8Tensor}[kind]
    main(["quantize", str(checkpoint), "--to", kind, "--dynamic", "--out", str(tmp_path / "out")])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    theirs, tokens = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval(), torch.arange(80).view(2, 40)
    for name in [key.removesuffix("_scale") for key in stored if key.endswith("_scale")]:
        codes, scales = stored[name], stored[f"{name}_scale"]
        weight = make(codes, scales, block_size=[1, codes.shape[1]], dtype=torch.float32)
        theirs.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        expected, actual = rounded(load_model(str(checkpoint)), kind, None)(tokens), theirs(tokens).logits
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_transformers_writes_the_format_of_torchao(checkpoint: Path, tmp_path: Path) -> None:
    """The commands are from docs/cli.md."""
    torchao = pytest.importorskip("torchao.quantization")
    load, tokens = transformers.AutoModelForCausalLM.from_pretrained, torch.arange(40)[None]
    how = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2))
    model = load(checkpoint, quantization_config=how, dtype="auto")
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out", dtype="auto")
    assert isinstance(again.get_submodule("model.layers.0.mlp.up_proj").weight, torchao.Int8Tensor)
    with torch.no_grad():
        before, after = load(checkpoint)(tokens).logits, again(tokens).logits
        assert_close(after, model(tokens).logits)
    assert 0 < (after - before).abs().max() < 0.1


@pytest.mark.parametrize(("kind", "columns"), [("int8", 96), ("int8", 90), ("int4", 128), ("fp8", 96), ("mxfp4", 96)])
def test_compressed_tensors_writes_the_same_tensors(kind: str, columns: int) -> None:
    from tune.quantization import Compressor

    torch.manual_seed(0)
    weight = torch.randn(48, columns)
    weight[3] = 0
    compressor = Compressor(kind, {"layer.weight": columns})
    config = compressor.config("float32")
    weights = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    blocks = weight.unflatten(1, (-1, compressor.group or columns))
    scale, _ = calculate_qparams(blocks.amin(2), blocks.amax(2), weights)
    library: type[BaseCompressor] = BaseCompressor.get_value_from_registry(config["format"])
    made: dict[str, Tensor] = library.compress(
        {"weight": weight, "weight_scale": scale}, QuantizationScheme(targets=["Linear"], weights=weights)
    )
    ours = {name.removeprefix("layer."): tensor for name, tensor in compressor.tensors("layer.weight", weight)}
    assert ours.keys() == made.keys()
    rows = torch.arange(48) != 3  # a row of zeros has another scale; its codes are zero
    for name in ours.keys() - {"weight_shape"}:
        exact = ours[name].dtype == torch.int32
        one, other = (tensor[rows] if exact else tensor[rows].float() for tensor in (ours[name], made[name]))
        assert_close(one, other, rtol=0 if exact else 1e-6, atol=0)
    assert ours["weight_scale"].isfinite().all() and (ours["weight_scale"] > 0).all()


WRONG = {
    "no kind": (["MODEL"], "--to"),
    "unknown kind": (["MODEL", "--to", "int3"], "invalid choice: 'int3'"),
    "inputs in 4 bits": (["MODEL", "--to", "int4", "--dynamic"], "int4 weights do not support quantized inputs"),
    "inputs in NF4": (["MODEL", "--to", "nf4", "--dynamic"], "nf4 weights do not support quantized inputs"),
    "odd rows of MXFP4": (["ODD", "--to", "mxfp4"], "rows of 100 weights"),
    "nothing there": (["absent", "--to", "int8"], "absent"),
    "there already": (["MODEL", "--to", "int8", "--out", "MODEL"], "already exists"),
    "odd rows": (["ODD", "--to", "int4"], "do not divide into groups of 128 or 64 or 32. Use int8"),
    "experts": (["EXPERTS", "--to", "fp8"], "only dense models can be quantized"),
    "an unsupported quantization": (["AGAIN", "--to", "int8"], "quantized by bitsandbytes"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_inputs_are_refused(
    wrong: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = WRONG[wrong]
    places = {"MODEL": checkpoint, "NEW": tmp_path / "new"}
    if "ODD" in arguments:
        places["ODD"] = save_checkpoint(tmp_path / "odd", intermediate_size=100)
    if "EXPERTS" in arguments:
        places["EXPERTS"] = save_checkpoint(tmp_path / "experts", "MixtralConfig", num_local_experts=4)
    if "AGAIN" in arguments:
        places["AGAIN"] = tmp_path / "again"
        main(["quantize", str(checkpoint), "--to", "nf4", "--out", str(tmp_path / "again")])
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "NEW"]
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", *(str(places.get(argument, argument)) for argument in arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.weekly
@pytest.mark.skipif(not REAL.exists(), reason="needs the real model: make model")
def test_sizes_and_perplexities_of_a_real_model(tmp_path: Path) -> None:
    """The figures are in the table of docs/cli.md."""
    text = " ".join((Path(__file__).parents[2] / "LICENSE").read_text().split())
    tokens = torch.tensor([Tokenizer(str(REAL)).encode(text)[at : at + 256] for at in (0, 512, 1024, 1536)])

    def perplexity(model: nn.Module) -> float:
        with torch.no_grad():
            log_probs = model(tokens)[:, :-1].log_softmax(-1)
        return math.exp(-log_probs.gather(2, tokens[:, 1:, None]).mean().item())

    figures = {"fp32": ((REAL / "model.safetensors").stat().st_size / 1e6, perplexity(load_model(str(REAL))))}
    for kind in (*KINDS, "mxfp4", "nf4"):
        main(["quantize", str(REAL), "--to", kind, "--out", str(tmp_path / kind)])
        config = json.loads((tmp_path / kind / "config.json").read_text())["quantization_config"]
        group = None if kind == "nf4" else config["config_groups"]["group_0"]["weights"]["group_size"]
        size = (tmp_path / kind / "model.safetensors").stat().st_size / 1e6
        figures[kind] = size, perplexity(rounded(load_model(str(REAL)), kind, group))
    assert sum(tensor.nbytes for tensor in load_file(tmp_path / "int4" / "model.safetensors").values()) < 1.8e8
    print(figures)
    assert figures["int8"][1] / figures["fp32"][1] == pytest.approx(1, abs=0.02)
    assert figures["fp8"][1] / figures["fp32"][1] == pytest.approx(1, abs=0.05)
    assert figures["nf4"][0] < figures["int8"][0] and figures["nf4"][1] < figures["int4"][1] < 1.6 * figures["fp32"][1]
    assert figures["mxfp4"][1] / figures["fp32"][1] < 2

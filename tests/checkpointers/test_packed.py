"""Quantized checkpoints are read as transformers and compressed-tensors dequantize them."""

import json
import random
import re
import shutil
from pathlib import Path

import packed_checkpoints as made
import pytest
import torch
from helpers import as_in_transformers, make_adapter, run_processes, save_checkpoint
from packed_checkpoints import rewrite
from safetensors.torch import load_file, save_file

from tune.checkpointers import DiskTensor, export, load_model, open_checkpoint
from tune.checkpointers.packed import PackedTensor, plain_config, plain_tensors
from tune.cli import main
from tune.errors import TuneError
from tune.quantization import NF4Weight, quantize_linears

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 64, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 2}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FORMS = {
    "int4": ("pack-quantized", INT4 | {"symmetric": True}),
    "int4, with zeros": ("pack-quantized", INT4 | {"symmetric": False}),
    "int8": ("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
    "int8 of activations": ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
    "fp8": ("float-quantized", FLOAT8 | {"strategy": "channel"}),
    "fp8 of tensors": ("float-quantized", FLOAT8 | {"strategy": "tensor"}),
    "fp8 in blocks": ("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [32, 16]}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}


@pytest.fixture
def copy(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / "packed"))


def module_of(folder, weight):
    """Return the stored tensors of the module that owns `weight`, by their names within the module."""
    stem = weight.rpartition(".")[0] + "."
    return {name.removeprefix(stem): tensor for name, tensor in load(folder).items() if name.startswith(stem)}


def load(folder):
    return load_file(folder / "model.safetensors")


def quantized(folder):
    return {name: tensor for name, tensor in plain_tensors(folder).items() if isinstance(tensor, PackedTensor)}


def save_plain(folder, out):
    """Save the dequantized checkpoint that `plain_tensors` describes."""
    shutil.copytree(folder, out)
    tensors = {name: tensor.read() for name, tensor in plain_tensors(folder).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(plain_config(json.loads((folder / "config.json").read_text()))))
    return out


@pytest.mark.parametrize(
    ("make", "shape", "how"),
    [
        (made.fp8, ("LlamaConfig", {}), "FineGrainedFP8Config"),
        (made.fp8_of_tensors, ("LlamaConfig", {}), "FineGrainedFP8Config"),
        (made.fp8, ("DeepseekV3Config", DEEPSEEK), "FineGrainedFP8Config"),
        (made.mxfp4, ("GptOssConfig", GPT_OSS), "Mxfp4Config"),
        pytest.param(
            lambda folder: made.compressed(folder, *FORMS["int4"][:1], **FORMS["int4"][1]),
            ("LlamaConfig", {}),
            None,
            marks=as_in_transformers("5.23"),
        ),
    ],
    ids=["llama in blocks", "llama of tensors", "deepseek_v3", "gpt_oss", "compressed-tensors"],
)
@pytest.mark.filterwarnings("ignore:.*scales of activations")
def test_transformers_dequantizes_to_the_same_bits(make, shape, how, tmp_path):
    folder = make(save_checkpoint(tmp_path / "packed", shape[0], **shape[1]))
    load = transformers.AutoModelForCausalLM.from_pretrained
    settings = getattr(transformers, how or "CompressedTensorsConfig")(dequantize=True)
    theirs = load(folder, dtype="auto", quantization_config=settings).state_dict()
    ours = load(save_plain(folder, tmp_path / "plain"), dtype="auto").state_dict()
    assert len(quantized(folder)) >= 4 and theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("kind", FORMS)
def test_compressed_tensors_decompresses_to_the_same_bits(kind, copy):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    form, weights = FORMS[kind]
    folder = made.compressed(copy, form, **weights)
    library = BaseCompressor.get_value_from_registry(form)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    packed = quantized(folder)
    assert len(packed) == 21
    for name, tensor in list(packed.items())[:3]:
        expected = library.decompress(module_of(folder, name), scheme)["weight"]
        assert tensor.shape == [*expected.shape] and torch.equal(tensor.read(), expected.bfloat16()), name


def test_blocks_smaller_than_128(copy):
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

    folder = made.fp8(copy, size=48)
    expected = FP8BlockDequantizer(targets=[r"re:.*_proj$"], weight_block_size=(48, 48)).process(load(folder))
    tensors = {name: tensor.read() for name, tensor in plain_tensors(folder).items()}
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def test_awq_matches_the_conversion_of_compressed_tensors(copy):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    folder = made.awq(copy)
    name, tensor = next(iter(quantized(folder).items()))
    stem = name.removesuffix(".weight")
    converted = AutoAWQConverter(group_size=32).process(
        {f"{stem}.{key}": value for key, value in module_of(folder, name).items()}
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**INT4, symmetric=False))
    state = {key.removeprefix(f"{stem}."): value for key, value in converted.items()}
    expected = BaseCompressor.get_value_from_registry("pack-quantized").decompress(state, scheme)["weight"]
    assert expected.dtype == torch.float16
    assert torch.equal(tensor.read(), expected.bfloat16())
    open_checkpoint(folder)


@pytest.mark.parametrize("order", ["neighbors", "shuffled", "desc_act"])
@pytest.mark.parametrize(("bits", "version"), [(4, "gptq"), (8, "gptq"), (4, "gptq_v2")])
def test_gptq_matches_the_arithmetic_of_gptqmodel(bits, version, order, copy):
    """`scales[g_idx] * (codes - zeros[g_idx])` in fp16, by input; version 1 stores zeros minus one."""
    folder = made.gptq(copy, bits, checkpoint_format=version, desc_act=order == "desc_act")
    if order != "neighbors":  # as with static groups, and with act-order
        tensors = load(folder)
        for name in [name for name in tensors if name.endswith("g_idx")]:
            tensors[name] = tensors[name][torch.randperm(len(tensors[name]))].contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    name, tensor = next(iter(quantized(folder).items()))
    parts, per = module_of(folder, name), 32 // bits
    inputs, groups = tensor.shape[1], parts["g_idx"].long()

    def code(words, index):
        return (words >> bits * index) & (2**bits - 1)

    codes = torch.stack([code(parts["qweight"][row // per], row % per) for row in range(inputs)])
    zeros = [code(parts["qzeros"][:, column // per], column % per) for column in range(tensor.shape[0])]
    zeros = torch.stack(zeros, dim=1) + (version == "gptq")
    expected = parts["scales"][groups] * (codes - zeros[groups]).half()
    assert torch.equal(tensor.read(), expected.T.bfloat16())
    part = (slice(3, 21), slice(5, 50))
    assert torch.equal(tensor.read(part), expected.T.bfloat16()[part])
    open_checkpoint(folder)


@pytest.mark.parametrize("group", [-1, 4])
def test_groups_of_gptq_that_do_not_exist(group, copy):
    folder = made.gptq(copy)
    tensors = load(folder)
    name, tensor = next(iter(quantized(folder).items()))
    index = name.replace("weight", "g_idx")
    tensors[index][7] = group if group < 0 else len(tensors[name.replace("weight", "scales")])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TuneError, match=index.replace(".", r"\.")):
        tensor.read()


@pytest.mark.parametrize("kind", ["fp8 of 48", "awq", "gptq", "int4"])
def test_scales_that_are_not_finite(kind, copy):
    folder = MAKERS[kind](copy)
    tensors = load(folder)
    name, tensor = next(iter(quantized(folder).items()))
    scales = tensor.scales.tensor.name
    tensors[scales].view(-1)[1] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TuneError, match=scales.replace(".", r"\.")) as error:
        tensor.read()
    assert name in str(error.value)


def test_codes_that_are_not_finite(copy):
    folder = MAKERS["fp8 of 48"](copy)
    tensors = load(folder)
    name, tensor = next(iter(quantized(folder).items()))
    tensors[name].view(torch.uint8)[0, 0] = 0x7F  # NaN in E4M3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TuneError, match=name.replace(".", r"\.")):
        tensor.read()


def test_nvfp4_from_model_optimizer(copy):
    """Its second scale is a factor; compressed-tensors stores the inverse."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    def make(name, weight):
        rows, columns = weight.shape
        codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
        scales = (torch.rand(rows, columns // 16) * 400).to(made.FP8)
        stem = name.removesuffix(".weight")
        return {
            name: codes,
            f"{name}_scale": scales,
            f"{name}_scale_2": torch.tensor(3e-5),
            f"{stem}.input_scale": torch.ones(()),
        }

    folder = rewrite(copy, make, made.LINEAR, quant_method="modelopt", quant_algo="NVFP4")
    with pytest.warns(UserWarning, match="input_scale"):
        packed = quantized(folder)
    assert len(packed) == 21
    for name, tensor in packed.items():
        parts = module_of(folder, name)
        values = unpack_fp4_from_uint8(parts["weight"], tensor.shape[0], tensor.shape[1]).double()
        exact = values * parts["weight_scale"].double().repeat_interleave(16, 1) * parts["weight_scale_2"].double()
        torch.testing.assert_close(tensor.read().double(), exact, rtol=2**-8, atol=0)


MAKERS = {
    "fp8 of 48": lambda folder: made.fp8(folder, 48),
    "awq": made.awq,
    "gptq": made.gptq,
    "gptq of no order": lambda folder: without(made.gptq(folder), "g_idx"),
    **{kind: lambda folder, kind=kind: made.compressed(folder, FORMS[kind][0], **FORMS[kind][1]) for kind in FORMS},
}


@pytest.mark.parametrize("kind", MAKERS)
def test_slice_equals_the_slice_of_the_whole_tensor(kind, copy, monkeypatch):
    tensor = list(quantized(MAKERS[kind](copy)).values())[-1]
    require_slices(tensor, monkeypatch)


def test_slice_of_stacked_experts(tmp_path, monkeypatch):
    folder = made.mxfp4(save_checkpoint(tmp_path, "GptOssConfig", **GPT_OSS, intermediate_size=96))
    for tensor in list(quantized(folder).values())[:2]:
        require_slices(tensor, monkeypatch)


def require_slices(tensor, monkeypatch):
    draw, whole = random.Random(0), tensor.read()
    for at_a_time in (2**22, 100):
        monkeypatch.setattr("tune.checkpointers.packed.AT_A_TIME", at_a_time)
        for _ in range(10):
            ends = [sorted(draw.choices(range(size + 1), k=2)) for size in tensor.shape]
            where = tuple(slice(*pair) for pair in ends)[: draw.randint(1, len(ends))]
            assert torch.equal(tensor.read(where), whole[where]), where
        assert torch.equal(tensor.read((slice(None),)), whole)


def test_only_the_slice_is_read(tmp_path, monkeypatch):
    folder = made.mxfp4(save_checkpoint(tmp_path, "GptOssConfig", **GPT_OSS, intermediate_size=96))
    tensor, read = next(iter(quantized(folder).values())), []

    def watched(self, where=(), before=DiskTensor.read):
        read.append(before(self, where))
        return read[-1]

    monkeypatch.setattr(DiskTensor, "read", watched)
    tensor.read((slice(1, 2), slice(0, 32), slice(8, 12)))
    assert [part.numel() for part in read] == [4, 4 * 16]  # 4 outputs of one expert: a block of 32 inputs


def test_qlora_base_equals_the_plain_checkpoint(copy, tmp_path):
    folder = made.fp8(copy)
    plain = save_plain(folder, tmp_path / "plain")

    def codes(path):
        model, weights = open_checkpoint(path)
        quantize_linears(model.requires_grad_(False))
        model.to_empty(device="cpu")
        weights.load(model)
        return [module.codes for module in model.modules() if isinstance(module, NF4Weight)]

    assert len(codes(folder)) == 21
    assert all(map(torch.equal, codes(folder), codes(plain)))


@pytest.mark.parametrize("kind", ["fp8 of 48", "awq", "nvfp4"])
def test_export_is_dequantized(kind, copy, tmp_path):
    folder = MAKERS[kind](copy)
    (folder / "hf_quant_config.json").write_text("{}")
    main(["export", str(folder), "--to", "hf", "--out", str(tmp_path / "out")])
    expected, exported = load(save_plain(folder, tmp_path / "plain")), load(tmp_path / "out")
    assert exported.keys() == expected.keys()
    assert all(
        exported[name].dtype == torch.bfloat16 and torch.equal(exported[name], expected[name]) for name in exported
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_model(folder)(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_adding_tokens_dequantizes_the_checkpoint(copy, tmp_path):
    main(["add-tokens", str(made.fp8(copy)), str(tmp_path / "out"), "<new>"])
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert {tensor.dtype for tensor in load(tmp_path / "out").values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "mxfp4"])
def test_checkpoints_from_tune_quantize_can_be_read(kind, checkpoint, tmp_path):
    main(["quantize", str(checkpoint), "--to", kind, "--out", str(tmp_path / "out")])
    how = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=how, dtype="auto")
    model = load_model(tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(model.names.on_disk[name])), name


def test_model_loaded_through_transformers(tmp_path):
    shape = {"rotary_pct": 0.5, "intermediate_size": 128, "hidden_size": 64}
    folder = save_checkpoint(tmp_path / "packed", "GPTNeoXConfig", **shape)
    made.fp8(folder, matching=r"(query_key_value|dense|dense_.*)\.weight$")
    how = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=how).float()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_model(folder)(tokens), theirs.eval()(tokens).logits, rtol=1e-5, atol=1e-5)


def test_module_groups_have_their_own_formats(copy):
    """As in Kimi K2 Thinking: names take precedence over module kinds."""
    made.compressed(copy, "pack-quantized", r"mlp\..*_proj\.weight$", **FORMS["int4"][1])
    first = json.loads((copy / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    made.compressed(copy, "float-quantized", r"self_attn\..*_proj\.weight$", **FORMS["fp8"][1])
    config = json.loads((copy / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"] = [r"re:.*self_attn\..*"]
    config["quantization_config"] |= {"format": "mixed-precision", "config_groups": {"all": first} | groups}
    (copy / "config.json").write_text(json.dumps(config))
    packed = quantized(copy)
    assert len(packed) == 21
    per = {name.rpartition("layers.")[2]: tensor.codes.per for name, tensor in packed.items()}
    assert per["0.self_attn.q_proj.weight"] == 1 and per["0.mlp.up_proj.weight"] == 8


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def without(folder, pattern):
    tensors = {name: tensor for name, tensor in load(folder).items() if pattern not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kind", "spoil", "facts"),
    [
        ("fp8 of 48", {"quant_method": "hqq"}, ["config.json", "hqq", "compressed-tensors", "dequantize=True"]),
        ("fp8 of 48", {"quant_method": None}, ["config.json", "unnamed"]),
        (
            "fp8 of 48",
            {"weight_block_size": [16, 16]},
            ["model.safetensors", "down_proj.weight_scale_inv", "[2, 3]", "[4, 8]"],
        ),
        ("fp8 of 48", {"weight_block_size": 128}, ["config.json", "quantization_config"]),
        ("fp8 of 48", "_scale_inv", ["down_proj.weight", "float8_e4m3fn", "no scales"]),
        ("int4", {"format": None, "config_groups": {}}, ["config.json", "quantization_config"]),
        ("int4", "weight_scale", ["down_proj.weight_packed", "int32", "no scales"]),
        ("awq", {"bits": 8}, ["8 bits", "AWQ"]),
        ("awq", {"version": "gemv"}, ["gemv", "AWQ"]),
        ("gptq", "qzeros", ["GPTQ", "without zeros", "down_proj.weight"]),
        ("fp8 of 48", {"quant_method": ["fp8"]}, ["config.json", "['fp8']"]),
        ("fp8 of 48", {"weight_block_size": [0, 48]}, ["config.json", "quantization_config"]),
        ("fp8 of 48", {"weight_block_size": [48, 48, 48]}, ["config.json", "quantization_config"]),
        ("fp8 of 48", {"weight_block_size": None}, ["down_proj.weight [64, 128]", "[2, 3]", "no weight_block_size"]),
        ("gptq of no order", {"desc_act": True}, ["GPTQ", "desc_act=True", "g_idx", "down_proj.weight"]),
        ("gptq", {"dynamic": {"-:.*q_proj": {}, ".*down.*": {"bits": 8}}}, ["GPTQ", "dynamic: .*down.*"]),
        ("int4", {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, ["transform_config", "R1"]),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config", "sparse-24-bitmask"]),
        ("gptq", {"bits": 3}, ["GPTQ", "3 bits"]),
        ("awq", {"group_size": 64}, ["down_proj.scales", "[4, 64]", "[2, 64]"]),
    ],
)
def test_unsupported_checkpoints_are_rejected(kind, spoil, facts, copy):
    folder = MAKERS[kind](copy)
    change(folder, **spoil) if isinstance(spoil, dict) else without(folder, spoil)
    with pytest.raises(TuneError) as error:
        open_checkpoint(folder)
    assert [fact for fact in facts if fact not in str(error.value)] == []


@pytest.mark.parametrize("settings", ["fp8", ["fp8"]])
def test_settings_must_be_a_mapping(settings, checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(TuneError, match=r"config\.json.*fp8"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weights", "facts"),
    [
        ({"num_bits": 3}, ["3 bits", "down_proj.weight"]),
        ({"actorder": "group"}, ["pack-quantized", "down_proj.weight"]),
        ({"actorder": True}, ["pack-quantized", "down_proj.weight"]),
        ({"strategy": "attn_head"}, ["config.json", "attn_head"]),
    ],
)
def test_unsupported_schemes_are_rejected(weights, facts, copy):
    folder = MAKERS["int4"](copy)
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["weights"] |= weights
    change(folder, config_groups=groups)
    with pytest.raises(TuneError) as error:
        open_checkpoint(folder)
    assert [fact for fact in facts if fact not in str(error.value)] == []


@pytest.mark.parametrize("form", ["marlin-24", "sparse-bitmask"])
def test_unsupported_formats_are_rejected(form, copy):
    folder = MAKERS["fp8 of tensors"](copy)
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["format"] = form
    change(folder, config_groups=groups)
    with pytest.raises(TuneError, match=form):
        open_checkpoint(folder)


DOWN = r".*layers\.1\..*experts\.\d+\.down_proj"
PLAIN = r"\.self_attn\.(q|k|v|o)_proj\.weight$"  # modules with a changed weight


@pytest.mark.parametrize(
    ("make", "shape", "target", "plain", "excluded"),
    [
        (made.mxfp4, ("GptOssConfig", GPT_OSS), "q_proj", r"$^", []),
        (made.fp8, ("LlamaConfig", {}), "q_proj", PLAIN, ["model.layers.0.self_attn.k_proj"]),
        (made.fp8, ("DeepseekV3Config", DEEPSEEK), DOWN, r"layers\.1.mlp\.experts\.", ["model.layers.1.mlp.experts"]),
        (MAKERS["int4"], ("LlamaConfig", {}), "q_proj", PLAIN, ["model.layers.2.self_attn.q_proj"]),
    ],
    ids=["gpt_oss", "llama", "deepseek_v3", "compressed-tensors"],
)  # fmt: skip
def test_weights_without_an_adapter_stay_packed(make, shape, target, plain, excluded, tmp_path):
    base = make(save_checkpoint(tmp_path / "base", shape[0], **shape[1]))
    targets = target if "*" in target else [target]
    adapter = make_adapter(base, tmp_path / "adapter", 1, target_modules=targets)
    for out, flags in {"merged": [], "packed": ["--packed"]}.items():
        main(["merge", str(base), str(adapter), str(tmp_path / out), *flags])
    merged, stored = load(tmp_path / "merged"), load(tmp_path / "packed")
    packed, before = quantized(base), load(base)
    kept = {name for name in packed if not re.search(plain, name)}
    assert quantized(tmp_path / "packed").keys() == kept
    assert kept and (kept != packed.keys()) == bool(excluded)
    for name in kept:
        for part in packed[name].parts:
            assert torch.equal(stored[part.name].view(torch.uint8), before[part.name].view(torch.uint8)), part.name
    assert all(torch.equal(stored[name], merged[name]) for name in merged.keys() - kept)
    config, fields = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("packed", "base"))
    for key in ("modules_to_not_convert", "ignore"):
        now, then = (mapping["quantization_config"].get(key) or [] for mapping in (config, fields))
        assert set(now) >= {*then} and (not now or set(now) >= {*excluded})

    # transformers reads both to the same model.
    how = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}.get(config["quantization_config"]["quant_method"])
    settings = getattr(transformers, how or "CompressedTensorsConfig")(dequantize=True)
    open_ = transformers.AutoModelForCausalLM.from_pretrained
    theirs = open_(tmp_path / "packed", dtype="auto", quantization_config=settings).state_dict()
    for name, tensor in open_(tmp_path / "merged", dtype="auto").state_dict().items():
        assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize(("size", "kept"), [(96, 8), (48, 0)])
def test_weights_that_transformers_cannot_read_are_written_plain(size, kept, copy, tmp_path, capsys):
    """Blocks of 96 divide no MLP of 128, blocks of 48 no weight. transformers derives the blocks from the shapes."""
    base = made.fp8(copy, size)
    adapter = make_adapter(base, tmp_path / "adapter", 1, target_modules=[r"layers.1.self_attn.q_proj"])
    main(["merge", str(base), str(adapter), str(tmp_path / "merged")])
    with pytest.warns(UserWarning, match=rf"\[{size}, {size}\].*mlp\.down_proj\.weight"):
        main(["merge", str(base), str(adapter), str(tmp_path / "out"), "--packed"])
    assert f"{kept} of 21" in capsys.readouterr().out
    assert len(quantized(tmp_path / "out")) == kept
    assert ("quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())) == bool(kept)
    settings = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)} if kept else {}
    open_ = transformers.AutoModelForCausalLM.from_pretrained
    theirs = open_(tmp_path / "out", dtype="auto", **settings).state_dict()
    for name, tensor in open_(tmp_path / "merged", dtype="auto").state_dict().items():
        assert torch.equal(theirs[name], tensor), name


def test_damaged_scales_are_named(copy, tmp_path, capsys):
    folder = made.fp8(copy)
    tensors, name = load(folder), "model.layers.1.mlp.up_proj.weight_scale_inv"
    tensors[name][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit):
        main(["export", str(folder), "--to", "hf", "--out", str(tmp_path / "out")])
    message = capsys.readouterr().err
    assert name in message and str(folder / "model.safetensors") in message and "raining" not in message


def test_packed_merge_needs_a_quantized_base(checkpoint, tmp_path):
    adapter = make_adapter(checkpoint, tmp_path / "adapter", 1, target_modules=["q_proj"])
    with pytest.raises(SystemExit):
        main(["merge", str(checkpoint), str(adapter), str(tmp_path / "out"), "--packed"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_loading_needs_memory_for_one_slice(processes, tmp_path):
    """Beyond the fp32 model: the bf16 part of 33 million weights of stacked experts, and the slice being dequantized.
    In fp32 at once, they would take 134 MB in each of three steps."""
    shape = GPT_OSS | {"num_local_experts": 8, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64}
    made.mxfp4(save_checkpoint(tmp_path, "GptOssConfig", **shape))
    script = Path(__file__).with_name("measure_loading.py")
    grown, held = map(float, run_processes(script, processes, str(tmp_path)).split()[-2:])
    assert held > 380 / processes
    assert grown < held + 67 / processes + 160


def test_frozen_weights_stay_packed(copy, tmp_path):
    """In a partly trained model without adapters."""
    base = made.fp8(copy)
    model, weights = load_model(base), open_checkpoint(base)[1]
    model.requires_grad_(False)
    trained = model.blocks[1].mlp.down.weight.requires_grad_(True)
    with torch.no_grad():
        trained += 0.01
    export(model, None, tmp_path / "out", source=base, base=weights, packed=True)
    kept = {name for name in quantized(base) if "layers.1.mlp" not in name}
    assert quantized(tmp_path / "out").keys() == kept
    tensors = {name: tensor.read() for name, tensor in plain_tensors(tmp_path / "out").items()}
    for name, tensor in plain_tensors(base).items():
        is_trained = name == "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(tensors[name], trained.bfloat16() if is_trained else tensor.read()), name
    export(model, None, tmp_path / "plain", source=base, packed=False)
    assert not quantized(tmp_path / "plain")


def test_float8_without_quantization_config_is_rejected(checkpoint, tmp_path):
    """It would be read as plain numbers."""
    folder = shutil.copytree(checkpoint, tmp_path / "coded")
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(TuneError, match=rf"{name} is quantized .*quantization_config"):
        plain_tensors(folder)

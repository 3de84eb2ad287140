"""User errors with adapters: one message with the place, the cause and the solution, and exit code 2."""

import json

import lora_finetune
import pipeline_finetune
import pytest
import torch
from helpers import REFUSED_BY, save_checkpoint

from tune import distributed
from tune.checkpointers import load_model
from tune.cli import main
from tune.peft import LoRA, add_adapters, export_adapter
from tune.tokenizers import Tokenizer

SETTINGS = {
    "adapter.rank=0": "adapter.rank: 0 is not a positive integer",
    "adapter.rank=65": "adapter.rank: 65 is more than the width of blocks.0.attention.query (64)",
    "adapter.alpha=0": "adapter.alpha: 0 is not a positive number",
    "adapter.dropout=1": "adapter.dropout: 1 is not a number from 0 to below 1",
    "adapter.dropout=-0.1": "adapter.dropout: -0.1 is not a number from 0 to below 1",
    "adapter.target_modules=[]": "adapter.target_modules: '[]' matches no layer",
    "adapter.target_modules=[q_prj]": "'q_prj' matches no layer. Did you mean 'q_proj'?",
    "adapter.target_modules=[norm]": "'norm' is a RMSNorm, which cannot have an adapter",
    "adapter.target_modules=.*(": "adapter.target_modules: '.*(' is not a regular expression",
    "adapter.rank_pattern={q_prj: 4}": "adapter.rank_pattern: no adapted layer's name ends with or matches 'q_prj'",
    "adapter.alpha_pattern={lm_head: 4}": "adapter.alpha_pattern: no adapted layer's name ends with or matches",
    "adapter.rank_pattern={q_proj: 0}": "adapter.rank_pattern: in {'q_proj': 0}, 0 is not a positive integer",
    "adapter.init=pisa": "adapter.init: 'pisa' is not one of default, pissa, olora",
    "adapter.modules_to_save=[embed_token]": "Did you mean 'embed_tokens'?",
    "adapter.trainable_tokens=[9999]": "adapter.trainable_tokens: 9999 is not a row of the embedding",
    "model.quantization=int4": "model.quantization: 'int4' is not nf4 or null",
    "parameter_groups.lr_ratios={lora_c: 16}": "parameter_groups.lr_ratios: 'lora_c' matches no trained",
    "adapter.path=nowhere": "adapter.path: nowhere has no adapter_config.json",
    "from_scratch=true": "from_scratch: is not a setting. It is an edit",
}


@pytest.mark.parametrize(*REFUSED_BY)
@pytest.mark.parametrize("setting", SETTINGS)
def test_wrong_setting(setting, by, inputs, run_recipe, capfd, told):
    settings = [*inputs.settings(), f"output_dir={inputs.folder / 'new'}", setting]
    if by == "validate":
        assert SETTINGS[setting] in told("lora_finetune", settings)
        return
    assert run_recipe(settings, lora_finetune) == 2
    message = capfd.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    assert SETTINGS[setting] in message


@pytest.mark.slow
def test_quantization_of_trained_weights_is_refused(inputs, run_recipe, capfd, told):
    message = "model.quantization: quantized weights are frozen, and the run has no adapter to train. Set adapter.rank"
    settings = inputs.settings("model.quantization=nf4", f"output_dir={inputs.folder / 'new'}")
    assert message in told("pipeline_finetune", settings)
    assert run_recipe(settings, pipeline_finetune) == 2
    assert message in capfd.readouterr().err


@pytest.mark.slow
def test_quantized_modules_are_not_trained_whole(inputs, run_recipe, capfd, told):
    settings = ["model.quantization=nf4", "adapter.modules_to_save=[q_proj]", "adapter.target_modules=[v_proj]"]
    settings = inputs.settings(*settings, f"output_dir={inputs.folder / 'new'}")
    assert "blocks.0.attention.query is quantized and cannot be trained" in told("lora_finetune", settings)
    assert run_recipe(settings, lora_finetune) == 2
    assert "blocks.0.attention.query is quantized and cannot be trained" in capfd.readouterr().err


@pytest.fixture
def adapter(inputs, checkpoint):
    """A folder with an adapter for `checkpoint`."""
    model, lora = load_model(str(checkpoint)), LoRA(rank=4, modules_to_save=["embed_tokens"])
    add_adapters(model, lora)
    folder, world = inputs.folder / "adapter", distributed.init("cpu")
    export_adapter(model, folder, world=world, base=str(checkpoint), tokenizer=Tokenizer(str(checkpoint)))
    return folder


@pytest.mark.slow
def test_adapter_of_another_base(adapter, inputs, run_recipe, capfd, told):
    wider = save_checkpoint(inputs.folder / "wider", intermediate_size=160)
    settings = [f"model.path={wider}", f"adapter.path={adapter}", f"output_dir={inputs.folder / 'new'}"]
    assert "is for another model" in told("lora_finetune", [*inputs.settings(), *settings])
    assert run_recipe([*inputs.settings(), *settings], lora_finetune) == 2
    message = capfd.readouterr().err
    assert "is for another model" in message and "has shape [4, 128], this model needs [4, 160]" in message
    assert "tokens per sample" not in capfd.readouterr().out  # before the data are prepared


@pytest.mark.slow
def test_adapter_with_a_damaged_file(adapter, inputs, run_recipe, capfd, told):
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    settings = [f"adapter.path={adapter}", f"output_dir={inputs.folder / 'new'}"]
    assert "adapter_model.safetensors is damaged" in told("lora_finetune", inputs.settings(*settings))
    assert run_recipe([*inputs.settings(), *settings], lora_finetune) == 2
    assert "adapter_model.safetensors is damaged" in capfd.readouterr().err


@pytest.mark.slow
def test_run_of_another_recipe_is_refused_before_data_preparation(inputs, run_recipe, capfd, told):
    message = "is a run of the recipe full_finetune, not lora_finetune"
    for settings in ([], [f"resume={inputs.run}", f"output_dir={inputs.folder / 'new'}"]):
        assert message in told("lora_finetune", inputs.settings(*settings))
        assert run_recipe(inputs.settings(*settings), lora_finetune) == 2
        output = capfd.readouterr()
        assert message in output.err and "tokens per sample" not in output.out


@pytest.mark.slow
def test_preference_run_does_not_resume_with_an_adapter(inputs, run_recipe, capfd, told):
    """One recipe trains with and without adapters."""
    import preference_finetune

    pairs = inputs.write_rows(*({"instruction": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(8)))
    settings = inputs.settings(*pairs, f"output_dir={inputs.folder / 'pairs'}")
    assert run_recipe(settings, preference_finetune) == 0
    capfd.readouterr()
    error = told("preference_finetune", [*settings, "adapter.rank=4"])
    assert "checkpoints/step-00000002" in error and "adapter" in error
    assert run_recipe([*settings, "adapter.rank=4"], preference_finetune) == 2
    error = capfd.readouterr().err
    assert "checkpoints/step-00000002" in error and "adapter" in error


CHANGED = {
    "adapter.alpha=8": "alpha was 32 and is now 8",
    "adapter.rank_stabilized=true": "rank_stabilized was False and is now True",
    "adapter.init=olora": "init was default and is now olora",
    "adapter.trainable_tokens=[7,8]": "trainable_tokens was [5, 6] and is now [7, 8]",
}


@pytest.mark.slow
def test_resume_with_other_adapter_settings(inputs, run_recipe, capfd, told):
    """All of these settings keep the names and shapes of trained weights."""
    settings = [*inputs.settings(), f"output_dir={inputs.folder / 'new'}", "adapter.trainable_tokens=[5,6]"]
    assert run_recipe([*settings, "max_steps=1"], lora_finetune) == 0
    for setting, message in CHANGED.items():
        capfd.readouterr()
        message = f"the checkpoint was made with another adapter: {message}"
        assert message in told("lora_finetune", [*settings, setting])
        assert run_recipe([*settings, setting], lora_finetune) == 2
        assert message in capfd.readouterr().err
    assert run_recipe([*settings, "adapter.dropout=0.1"], lora_finetune) == 0


def test_merging_into_quantized_weights(adapter, inputs, capfd):
    inputs.change_json("config.json", quantization_config={"quant_method": "hqq", "bits": 4})
    assert fails(["merge", str(inputs.model), str(adapter), str(inputs.folder / "out")]) == 2
    assert "quantized by hqq" in capfd.readouterr().err


def test_merging_into_a_base_with_another_vocabulary(adapter, inputs, capfd):
    """The number of tokens is the same, but two tokens have swapped their ids."""
    fields = json.loads((inputs.model / "tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (inputs.model / "tokenizer.json").write_text(json.dumps(fields))
    assert fails(["merge", str(inputs.model), str(adapter), str(inputs.folder / "out")]) == 2
    assert "was trained with another vocabulary" in capfd.readouterr().err


def test_merging_a_non_finite_adapter(adapter, inputs, capfd):
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    next(iter(tensors.values())).fill_(torch.nan)
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert fails(["merge", str(inputs.model), str(adapter), str(inputs.folder / "out")]) == 2
    assert "has non-finite values" in capfd.readouterr().err
    assert not (inputs.folder / "out").exists()


def fails(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code

"""A transformers model in memory stays usable while it is trained, sharded and sampled from."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import Pretrained
from tune.collators import Batch
from tune.errors import TuneError
from tune.generation import Sampler
from tune.losses import LinearCrossEntropy
from tune.models import HuggingFaceModel, hf
from tune.peft import LoRA, add_adapters, export_adapter

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(5, 45).view(2, 20)


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["checkpoint", "tied_checkpoint"])
def test_wrapped_model_stays_whole_and_shares_its_parameters(folder, request):
    folder = request.getfixturevalue(folder)
    model, reference = loaded(folder), loaded(folder)
    names = model.state_dict().keys()
    wrapped = hf(model)
    assert isinstance(wrapped, HuggingFaceModel) and hf(wrapped) is wrapped
    for _ in range(2):  # also after a forward of the other model
        assert_close(model(TOKENS).logits, reference(TOKENS).logits, rtol=0, atol=0)
        assert_close(wrapped(TOKENS), reference(TOKENS).logits, atol=1e-6, rtol=1e-6)
    assert model.state_dict().keys() == names and {*wrapped.parameters()} == {*model.parameters()}

    loss = wrapped(Batch.of(TOKENS, TOKENS.roll(-1)), LinearCrossEntropy())
    loss.backward()
    expected = F.cross_entropy(reference(TOKENS).logits.flatten(0, 1), TOKENS.roll(-1).flatten(), reduction="sum")
    expected.backward()
    assert_close(loss, expected)
    for name, parameter in reference.named_parameters():
        assert_close(model.get_parameter(name).grad, parameter.grad, atol=1e-4, rtol=1e-4)
    torch.optim.SGD(wrapped.parameters(), lr=0.01).step()
    assert_close(model(TOKENS).logits, wrapped(TOKENS), atol=1e-6, rtol=1e-6)
    assert not torch.equal(model(TOKENS).logits, reference(TOKENS).logits)


def test_adapters_apply_to_the_model_and_its_wrapper(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    model = loaded(checkpoint)
    wrapped = hf(model)
    add_adapters(wrapped, LoRA(rank=4, target_modules=["q_proj"]))
    for parameter in wrapped.parameters():
        parameter.data += 0.05 * parameter.requires_grad
    assert_close(model(TOKENS).logits, wrapped(TOKENS), atol=1e-6, rtol=1e-6)
    export_adapter(wrapped, tmp_path / "adapter", base=checkpoint)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert_close(theirs(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_sampling_matches_transformers_generate(checkpoint):
    model = loaded(checkpoint)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    for prompt, (completion,) in zip(prompts, Sampler(max_new_tokens=8, temperature=0)(model, prompts), strict=True):
        config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = model.generate(torch.tensor([prompt]), config)[0, len(prompt) :]
        assert completion.tokens == expected.tolist()
    assert not any(module.training for module in model.modules())
    assert_close(model(TOKENS).logits, loaded(checkpoint)(TOKENS).logits, rtol=0, atol=0)


def test_meta_device_model_is_sharded_and_loaded(checkpoint):
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.model.rotary_emb.inv_freq.is_meta
    wrapped = hf(model)
    weights = Pretrained(str(checkpoint), wrapped)
    distributed.parallelize(wrapped, distributed.init("cpu"), dtype="fp32")
    weights.load(wrapped)
    assert_close(wrapped(TOKENS), loaded(checkpoint)(TOKENS).logits, atol=1e-6, rtol=1e-6)


def test_other_models_are_refused(checkpoint):
    peft = pytest.importorskip("peft")
    with pytest.raises(TuneError, match="Linear is not a transformers model"):
        hf(nn.Linear(2, 2))
    with pytest.raises(TuneError, match="has no cache"):
        Sampler(max_new_tokens=1)(nn.Linear(2, 2), [[1]])
    with pytest.raises(TuneError, match="merge_and_unload"):
        hf(peft.get_peft_model(loaded(checkpoint), peft.LoraConfig(target_modules=["q_proj"])))

"""Samples equal those of one row at a time without a cache."""

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import run_processes, weekly_but
from models.test_families import LATENT, SMALL, VARIANTS, make_pair
from torch import nn
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import Pretrained, load_model
from tune.collators import Batch
from tune.errors import TuneError
from tune.generation import Completion, Sampler, choose
from tune.generation.sampler import uniforms
from tune.models import build
from tune.models.delta_net import DeltaNetConfig
from tune.models.latent_attention import LatentAttentionConfig
from tune.peft import LoRA, add_adapters, initialize
from tune.quantization import quantize_linears
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

LENGTHS = [3, 40, 1, 12, 12, 25, 7]  # of prompts; windows have 16 tokens
KINDS = ["llama", "gemma3_text", "gpt_oss", "qwen3_5_text", "deepseek_v3", "phi3-longrope", "mixtral-window"]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    config_class, changes = VARIANTS[request.param]
    config = getattr(transformers, config_class)(**SMALL | changes)
    theirs, ours = make_pair(config, tmp_path_factory.mktemp(request.param))
    ours.saved_in = theirs.saved_in
    return ours


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_pair(transformers.LlamaConfig(**SMALL), tmp_path_factory.mktemp("llama"))


def make_prompts(lengths=LENGTHS):
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(SMALL["vocab_size"], (length,), generator=draw).tolist() for length in lengths]


def by_definition(model, prompt, count, temperature, *keys):
    """Sample by a forward of the whole document per token and the inverse cumulative distribution."""
    tokens = list(prompt)
    for uniform in islice(uniforms(*keys), count):
        logits = model(torch.tensor([tokens]))[0, -1].double() / temperature
        tokens.append(int((logits.softmax(dim=-1).cumsum(dim=-1) <= uniform).sum()))
    return tokens[len(prompt) :]


@pytest.mark.slow
@torch.no_grad()
def test_samples_and_log_probs_match_the_definition(model):
    prompts = make_prompts()[:4]
    sampler = Sampler(max_new_tokens=18, temperature=0.7, seed=5)
    outputs = sampler(model, prompts, samples=3, step=9)
    for index, (prompt, completions) in enumerate(zip(prompts, outputs, strict=True)):
        for sample, completion in enumerate(completions):
            assert completion.tokens == by_definition(model, prompt, 18, 0.7, 5, 9, index, sample)
        assert len({tuple(completion.tokens) for completion in completions}) == 3

    completions = [(prompt, output) for prompt, row in zip(prompts, outputs, strict=True) for output in row]
    texts = [torch.tensor(prompt + output.tokens) for prompt, output in completions]
    ids = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(text) for text in texts]))
    logits = model(Batch.of(torch.cat(texts)[None], documents=ids[None]))[0].split([len(text) for text in texts])
    for (prompt, completion), text, scores in zip(completions, texts, logits, strict=True):
        expected = (scores[:-1] / 0.7).log_softmax(dim=-1).gather(1, text[1:, None])[len(prompt) - 1 :, 0]
        assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.weekly
@pytest.mark.parametrize("max_rows", weekly_but([3], [1, 3, 5]))
def test_max_rows_does_not_change_the_samples(model, max_rows):
    prompts = make_prompts()
    settings = {"max_new_tokens": 20, "stop_ids": range(9)}  # so that rows end at different times
    expected = Sampler(**settings)(model, prompts, samples=3)
    ends = [len(output.tokens) for row in expected for output in row]
    assert len(set(ends)) > 5
    outputs = Sampler(**settings, max_rows=max_rows)(model, prompts, samples=3)
    assert [[output.tokens for output in row] for row in outputs] == [
        [output.tokens for output in row] for row in expected
    ]
    assert_close(
        [torch.tensor(output.log_probs) for row in outputs for output in row],
        [torch.tensor(output.log_probs) for row in expected for output in row],
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip


@pytest.mark.slow
def test_order_and_subset_of_prompts_do_not_change_the_samples(llama):
    prompts, sampler = make_prompts(), Sampler(max_new_tokens=12)
    expected = sampler(llama[1], prompts, samples=2)
    for indices in ([6, 2, 0, 5], [1], [4, 3]):
        assert sampler(llama[1], [prompts[index] for index in indices], samples=2, indices=indices) == approximately(
            [expected[index] for index in indices]
        )
    assert sampler(llama[1], [], samples=2) == []
    # The number of samples does not change the first of them; step and seed do.
    assert [row[:1] for row in expected] == approximately(sampler(llama[1], prompts))
    for other in (sampler(llama[1], prompts, step=1), Sampler(max_new_tokens=12, seed=1)(llama[1], prompts)):
        assert all(output.tokens != row[0].tokens for (output,), row in zip(other, expected, strict=True))


def approximately(outputs):
    return [
        [Completion(output.tokens, pytest.approx(output.log_probs, abs=1e-5), output.finish) for output in row]
        for row in outputs
    ]


def test_stop_ids(llama):
    theirs, ours = llama
    prompts = make_prompts([3, 17])
    free = [output.tokens for (output,) in Sampler(max_new_tokens=32, temperature=0)(ours, prompts)]
    stop_ids = {free[0][4], free[1][9]}
    outputs = Sampler(max_new_tokens=32, temperature=0, stop_ids=stop_ids)(ours, prompts)
    for prompt, (completion,) in zip(prompts, outputs, strict=True):
        settings = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": sorted(stop_ids)}
        expected = theirs.generate(torch.tensor([prompt]), **settings)
        assert completion.tokens == expected[0, len(prompt) :].tolist()
        assert completion.tokens[-1] in stop_ids and completion.finish == "stop"
        assert len(completion.log_probs) == len(completion.tokens) <= 10


def test_last_token_may_be_a_stop(llama):
    (prompt,) = make_prompts([3])
    free = Sampler(max_new_tokens=5, temperature=0)(llama[1], [prompt])[0][0]
    assert free.finish == "length" and len(free.tokens) == 5
    stopped = Sampler(max_new_tokens=5, temperature=0, stop_ids=free.tokens[4:])(llama[1], [prompt])[0][0]
    assert stopped.finish == "stop" and stopped.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]


@pytest.mark.slow
def test_stop_strings_may_span_tokens(checkpoint):
    tokenizer, model = Tokenizer(str(checkpoint)), load_model(str(checkpoint))
    prompts = [tokenizer.encode(text) for text in ("the cat", "a red dog ran")]
    settings = {"max_new_tokens": 40, "seed": 3}
    for prompt, free in zip(prompts, Sampler(**settings)(model, prompts), strict=True):
        text = tokenizer.decode(free[0].tokens)
        for stop in {text[5:12], text[20:40], text[10:11], text[3:50]} - {""}:
            sampler = Sampler(**settings, stop_strings=["not there", stop], decode=tokenizer.decode)
            indices = [prompts.index(prompt)]
            (completion,) = sampler(model, [prompt], indices=indices)[0]
            count = len(completion.tokens)
            assert completion.tokens == free[0].tokens[:count] and completion.finish == "stop"
            assert stop in tokenizer.decode(completion.tokens)
            assert stop not in tokenizer.decode(completion.tokens[:-1])


def test_stop_string_that_starts_with_a_dropped_blank():
    """SentencePiece decoders drop the blank before the first token."""
    pieces = ["x", " ", "a", "b", " ab"]

    def decode(ids):
        return "".join(pieces[id] for id in ids).removeprefix(" ")

    sampler = Sampler(max_new_tokens=8, stop_strings=[" ab"], decode=decode)
    assert sampler.stops([0, 0, 1, 2, 3]) and sampler.stops([0, 0, 4])
    assert not sampler.stops([0, 0, 1, 2]) and not sampler.stops([0, 0, 0, 2, 3])


def test_prompts_are_read_once_and_without_padding(llama):
    shapes = []
    hook = llama[1].embedding.register_forward_hook(lambda module, inputs, output: shapes.append(inputs[0].shape))
    Sampler(max_new_tokens=3)(llama[1], make_prompts([5, 9]), samples=4)
    assert shapes == [(1, 14), (8, 1), (8, 1)]
    shapes.clear()
    Sampler(max_new_tokens=3, max_rows=3)(llama[1], make_prompts([5, 9]), samples=4)
    assert shapes == [(1, 5), (3, 1), (3, 1), (1, 9), (3, 1), (3, 1), (2, 1), (2, 1)]
    hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, {"dora": True}])
def test_sampling_with_adapters_disables_dropout(model, adapter):
    check_adapted(model, LoRA(rank=4, dropout=0.5, **adapter))


@pytest.mark.slow
def test_sampling_with_a_quantized_base(tmp_path):
    """Latent attention also reads weights without calling the layer."""
    widths = {"intermediate_size": 64, "moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 64}
    config = transformers.DeepseekV3Config(**SMALL | LATENT | widths | {"v_head_dim": 16})
    theirs, ours = make_pair(config, tmp_path)
    ours.saved_in = theirs.saved_in
    check_adapted(ours, LoRA(rank=4), quantize_linears)


def check_adapted(model, lora, change=lambda model: None):
    """Check that an adapted model samples as without a cache, and differently from `model`."""
    with torch.device("meta"):
        adapted = build(str(model.saved_in))
    weights = Pretrained(str(model.saved_in), adapted)
    change(adapted)
    add_adapters(adapted, lora)
    distributed.parallelize(adapted, distributed.init("cpu"), dtype="fp32")
    weights.load(adapted)
    initialize(adapted, seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.normal_(std=0.1)
    adapted.train()
    (prompt,) = make_prompts([7])
    (completion,) = Sampler(max_new_tokens=12)(adapted, [prompt])[0]
    assert all(module.training for module in adapted.modules())
    with torch.no_grad():
        assert completion.tokens == by_definition(adapted.eval(), prompt, 12, 1.0, 0, 0, 0, 0)
        assert completion.tokens != by_definition(model, prompt, 12, 1.0, 0, 0, 0, 0)


def test_contents_of_the_caches(model):
    """Caches hold keys and values of at most a window, latents, or one state for all tokens."""
    cache = model.new_cache(rows=3, capacity=30)
    batch = Batch.of([[5] * 10])
    cache.start([2], batch, torch.device("cpu"))
    with torch.no_grad():
        model(batch, cache=cache)
    for layer, config in zip(cache.layers, model.config.layers, strict=True):
        shapes, part = [tuple(stored.shape) for stored in layer.storage], config.attention
        if isinstance(part, LatentAttentionConfig):
            assert shapes == [(3, 1, 30, part.key_value_rank + part.rope.size)]
        elif isinstance(part, DeltaNetConfig):
            memory = (3, part.num_value_heads, part.key_dim, part.value_dim)
            assert shapes == [(3, part.kernel - 1, 2 * 2 * part.key_dim + 4 * part.value_dim), memory]
        else:
            assert shapes == [(3, part.num_kv_heads, min(part.window or 30, 30), part.head_dim)] * 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sampling_from_compiled_and_checkpointed_models(llama, dtype):
    """In bf16, FSDP casts the weights."""
    with torch.device("meta"):
        model = build(str(llama[0].saved_in))
    weights = Pretrained(str(llama[0].saved_in), model)
    options = {"activation_checkpointing": "full", "compile": True}
    distributed.parallelize(model, distributed.init("cpu"), dtype=dtype, **options)
    weights.load(model)
    plain = load_model(str(llama[0].saved_in), dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    sampler = Sampler(max_new_tokens=10)
    actual, expected = (sampler(network, make_prompts()) for network in (model, plain))
    assert actual == expected


@pytest.mark.slow
def test_device_other_than_the_cpu(model):
    """`meta` has no values but refuses tensors of mixed devices in prefill, decoding, copies and choices."""
    device = torch.device("meta")
    with device:
        moved = build(str(model.saved_in))
    cache = moved.new_cache(rows=3, capacity=40)
    batch = Batch.of([[5] * 30], documents=[[0] * 20 + [1] * 10])
    with torch.no_grad():
        cache.start([1, 0], batch, device)
        logits = moved(batch.to(device), cache=cache)
        cache.copy([(0, 2)])
        for positions in ([20, 10], [21, 11, 20], [21]):
            draws = torch.rand(len(logits), dtype=torch.float64)
            ids, log_probs = choose(logits[:, 0], draws, 0.7, top_k=3, top_p=0.5, min_p=0.1)
            assert ids.is_meta and log_probs.is_meta
            tokens = torch.zeros(len(positions), 1, dtype=torch.long, device=device)
            places = torch.tensor(positions)[:, None].to(device)
            cache.extend(places, max(positions) + 1)
            logits = moved(tokens, positions=places, cache=cache)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_prompts_of_any_kind(llama, kind):
    prompts, sampler = make_prompts(), Sampler(max_new_tokens=1)
    expected = sampler(llama[1], prompts, samples=2)
    assert sampler(llama[1], [kind(prompt) for prompt in prompts], samples=2) == expected
    assert [len(output.tokens) for row in expected for output in row] == [1] * 14
    assert sampler(llama[1], prompts, samples=0) == [[] for _ in prompts]


def test_repeated_prompt_is_read_once(llama):
    (prompt,) = make_prompts([5])
    alone = Sampler(max_new_tokens=6)(llama[1], [prompt], samples=2, indices=[1])
    both = Sampler(max_new_tokens=6)(llama[1], [prompt] * 3, samples=2)
    assert both[1:2] == approximately(alone)
    assert len({tuple(output.tokens) for row in both for output in row}) == 6


def test_host_waits_once_per_token(llama, monkeypatch):
    """The only transfer is that of the chosen tokens."""
    from recipes.test_synchronisation import Waits

    copies, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.shape) or cpu(tensor))
    with Waits() as waits:
        Sampler(max_new_tokens=6, max_rows=2, top_k=5, top_p=0.9)(llama[1], make_prompts([5]), samples=2)
    assert copies == [(2, 2, 1)] * 6
    assert not waits.found


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sampling_from_a_sharded_model(llama, count):
    script = Path(__file__).with_name("sharded_sampling.py")
    output = run_processes(script, count, str(llama[0].saved_in), str(make_prompts()))
    expected = Sampler(max_new_tokens=10, stop_ids=range(9))(llama[1], make_prompts(), samples=2)
    assert output.splitlines()[-1] == str([[output.tokens for output in row] for row in expected])


WRONG = {
    "max_new_tokens: 0 is not a positive integer": {"max_new_tokens": 0},
    "temperature: nan is not a non-negative number": {"temperature": math.nan},
    "temperature: -1 is": {"temperature": -1},
    "top_p: 0 is not a number above 0 and up to 1": {"top_p": 0},
    "top_p: 1.5 is": {"top_p": 1.5},
    "top_k: 0 is": {"top_k": 0},
    "min_p: 2 is": {"min_p": 2},
    "max_rows: 0 is": {"max_rows": 0},
    "seed: -1 is": {"seed": -1},
    "must not be empty": {"stop_strings": ["a", ""], "decode": str},
    "decode=tokenizer": {"stop_strings": ["a"]},
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_settings_are_refused(message):
    with pytest.raises(TuneError, match=message):
        Sampler(**{"max_new_tokens": 4} | WRONG[message])


@pytest.mark.parametrize(
    ("message", "prompts", "settings"),
    [
        ("prompt 1 is empty", [[1], []], {}),
        ("128 in prompt 0 is not one of the 128 tokens", [[1, 128]], {}),
        ("-1 in prompt 0", [[-1]], {}),
        ("prompt 0 has 250 tokens .* Lower one by 2$", [[1] * 250], {}),
        ("500 in stop_ids", [[1]], {"stop_ids": [3, 500]}),
    ],
)
def test_invalid_prompts_are_refused(message, prompts, settings, llama):
    with pytest.raises(TuneError, match=message):
        Sampler(max_new_tokens=8, **settings)(llama[1], prompts)


@pytest.mark.parametrize(
    ("prompts", "arguments", "facts"),
    [
        ([5, 6], {}, ["prompts:", "[[1, 2, 3]]"]),
        (["the cat"], {}, ["prompts:"]),
        ([[5], [6]], {"indices": [0]}, ["indices:", "1 for 2"]),
    ],
)
def test_invalid_calls_are_refused(prompts, arguments, facts, llama):
    with pytest.raises(TuneError) as error:
        Sampler(max_new_tokens=2)(llama, prompts, **arguments)
    assert all(fact in str(error.value) for fact in facts)


def test_prompt_that_just_fits(llama):
    """It fits the positions of the model, or `max_len`."""
    (longest, short), settings = make_prompts([248, 5]), {"max_new_tokens": 8}
    assert [len(row[0].tokens) for row in Sampler(**settings)(llama[1], [longest, short])] == [8, 8]
    assert len(Sampler(**settings, max_len=13)(llama[1], [short])[0][0].tokens) == 8
    with pytest.raises(TuneError, match=r"max_len \(12\)\. Lower one by 1"):
        Sampler(**settings, max_len=12)(llama[1], [short])


def test_unsuitable_models_are_refused(llama):
    sampler = Sampler(max_new_tokens=4)
    with pytest.raises(TuneError, match=r"Linear .* tune\.models\.build or tune\.models\.hf"):
        sampler(nn.Linear(2, 2), [[1]])
    broken = load_model(str(llama[0].saved_in)).train()
    broken.norm.weight.data[0] = math.nan
    with pytest.raises(TuneError, match="logits after 0 new tokens are NaN or infinite"):
        sampler(broken, [[1]])
    assert broken.training

"""Every verb and recipe accepts a model that only transformers implements, and computes what transformers does."""

import json
import random
import sys
import zlib

import pytest
import torch
from helpers import WORDS, make_adapter, save_checkpoint
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import load_model
from tune.cli import main
from tune.collators import Sample, collate
from tune.errors import TuneError
from tune.losses import score
from tune.models import HuggingFaceModel
from tune.peft import open_model, opened
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(5, 85).view(2, 40)
FAMILIES = {"stablelm": "StableLmConfig", "apertus": "ApertusConfig"}
COST = "is computed by transformers"


@pytest.fixture(scope="module", params=FAMILIES)
def base(request, tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


@pytest.fixture(autouse=True)
def say_again():
    """Reset the note on the cost, which is printed once per process."""
    opened._say_once.cache_clear()


def transformers_logits(folder, **arguments):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments).eval()
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.slow
@torch.no_grad()
def test_every_way_to_open_the_model(base, tmp_path, capsys):
    expected = transformers_logits(base)
    model = open_model(base).load()
    assert isinstance(model, HuggingFaceModel)
    assert capsys.readouterr().err.count(f"note: {base}: {model.config.model_type} {COST}") == 1
    assert_close(model(TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert_close(open_model(base).shard(distributed.init("cpu"))(TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert_close(load_model(base)(TOKENS), expected, atol=1e-5, rtol=1e-5)
    copied = open_model(base)
    copied.on_disk()
    copied.export(tmp_path / "out", "a copy")
    assert_close(transformers_logits(tmp_path / "out"), expected, atol=0, rtol=0)
    in_nf4 = open_model(base).load(quantization="nf4")(TOKENS)
    assert 0 < (in_nf4 - expected).norm() / expected.norm() < 0.3


@pytest.mark.slow
@torch.no_grad()
def test_adapter_matches_peft(base, tmp_path):
    """The merged model, the exported model and the frozen model match PEFT."""
    peft = pytest.importorskip("peft")
    adapter = make_adapter(base, tmp_path / "adapter", 1)
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    expected = peft.PeftModel.from_pretrained(whole, adapter).eval()(TOKENS).logits
    assert (expected - transformers_logits(base)).abs().max() > 1e-3
    main(["merge", str(base), str(adapter), str(tmp_path / "merged")])
    main(["export", str(adapter), "--to", "hf", "--out", str(tmp_path / "exported")])
    for folder in ("merged", "exported"):
        assert_close(transformers_logits(tmp_path / folder), expected, atol=1e-5, rtol=1e-5)
    assert_close(open_model(adapter).load()(TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert_close(open_model(adapter).shard(distributed.init("cpu"))(TOKENS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "within"),
    [
        ("int8", 0.02),
        *(pytest.param(*case, marks=pytest.mark.weekly) for case in (("fp8", 0.1), ("int4", 0.3))),
    ],
)
def test_transformers_loads_the_quantized_model(kind, within, base, tmp_path):
    pytest.importorskip("compressed_tensors")
    main(["quantize", str(base), "--to", kind, "--out", str(tmp_path / "out")])
    expected = transformers_logits(base)
    error = (transformers_logits(tmp_path / "out") - expected).norm() / expected.norm()
    assert 0 < error < within


def test_quantizing_transformers_experts_is_refused(tmp_path, capsys):
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2}
    folder = save_checkpoint(tmp_path / "model", "PhimoeConfig", **fields)
    with pytest.raises(SystemExit):
        main(["quantize", str(folder), "--to", "int8", "--out", str(tmp_path / "out")])
    assert "only dense models can be quantized" in capsys.readouterr().err


def test_added_tokens_keep_the_logits(base, tmp_path):
    main(["add-tokens", str(base), str(tmp_path / "more"), "<|one|>", "<|two|>"])
    with torch.no_grad():
        logits, expected = load_model(tmp_path / "more")(TOKENS), transformers_logits(base)
    assert_close(logits[..., : expected.shape[-1]], expected, atol=1e-5, rtol=1e-5)
    assert logits.shape[-1] == expected.shape[-1] + 2


@pytest.mark.slow
def test_answers_and_loss(base, tmp_path, capfd):
    main(["generate", str(base), "--prompt", "the cat", "--max-new-tokens", "6", "--raw", "--device", "cpu"])
    shown = capfd.readouterr()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    prompt = tokenizer("the cat", return_tensors="pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    answer = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert shown.out.rstrip("\n") == tokenizer.decode(answer, skip_special_tokens=True)
    assert f"{base}: {model.config.model_type} {COST}" in shown.err
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": " ".join(WORDS)}) + "\n")
    out = tmp_path / "out.json"
    main(["eval", str(base), "--data", str(tmp_path / "text.jsonl"), "--out", str(out), "device=cpu", "dtype=fp32"])
    ids = torch.tensor([Tokenizer(base).encode(" ".join(WORDS))])
    results = json.loads(out.read_text())["results"]["text"]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    # `tune eval` also counts the token that ends the text.
    assert results["loss,none"] == pytest.approx(losses.mean().item(), rel=0.1)


@torch.no_grad()
def test_reward_model_scores_match_transformers(tmp_path):
    folder = save_checkpoint(tmp_path / "scores", "StableLmConfig", pad_token_id=1)
    settings = transformers.AutoConfig.from_pretrained(folder)
    settings.num_labels = 1
    torch.manual_seed(0)
    theirs = transformers.AutoModelForSequenceClassification.from_config(settings).eval()
    theirs.save_pretrained(folder)
    model = open_model(folder, head="score").load()
    texts = [list(range(5, 25)), list(range(40, 48))]
    batch = collate([[Sample(torch.tensor(text).numpy(), torch.full((len(text),), -100).numpy()) for text in texts]])
    expected = [theirs(torch.tensor([text])).logits.item() for text in texts]
    assert score(model, batch).tolist() == pytest.approx(expected, rel=1e-4)
    with pytest.raises(TuneError, match="is a reward model"):
        open_model(folder)


def test_without_transformers(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TuneError, match=r"tune-recipes\[hf\]"):
        open_model(base)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with rows of each kind."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("data")

    def text():
        return " ".join(draw.choices(WORDS, k=draw.randint(2, 9)))

    kinds = {
        "chats": lambda: {"messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]},
        "pairs": lambda: {"prompt": text(), "chosen": text(), "rejected": text()},
        "requests": lambda: {"instruction": text()},
    }
    for name, make in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(make()) + "\n" for _ in range(8)))
    return folder


def spread(row, completion):
    """Return a different reward for each text, so that no group has equal rewards."""
    return zlib.crc32(completion.encode()) % 97 / 97


ROWS = ["max_seq_len=64", "global_batch_size=4"]
PROMPTS = [
    "max_prompt_len=32",
    "sampling.max_new_tokens=6",
    "prompts_per_step=4",
    "reward=recipes.test_not_native.spread",
]
# The recipe, its data and its settings; BASE stands for the model.
RECIPES = {
    "full": ("full_finetune", "chats", ROWS),
    "lora": ("lora_finetune", "chats", [*ROWS, "adapter.rank=4", "export.merge=true"]),
    "qlora": ("lora_finetune", "chats", [*ROWS, "model.quantization=nf4", "export.merge=true"]),
    "pipeline": ("pipeline_finetune", "chats", ROWS),
    "preference": ("preference_finetune", "pairs", [*ROWS, "reference=BASE"]),
    "reward": ("reward_finetune", "pairs", ROWS),
    "distill": ("distill", "chats", [*ROWS, "teacher.path=BASE", "teacher.quantization=nf4"]),
    "distill top_k": ("distill", "chats", [*ROWS, "teacher.path=BASE", "teacher.top_k=5"]),
    "grpo": ("grpo", "requests", [*PROMPTS, "group_size=2", "kl=0.1"]),
    "ppo": ("ppo_finetune", "requests", PROMPTS),
}


def arguments(case, base, data):
    recipe, rows, settings = RECIPES[case]
    common = [
        f"model.path={base}",
        f"dataset.path={data / rows}.jsonl",
        "device=cpu",
        "compute.dtype=fp32",
        "max_steps=2",
    ]
    return recipe, [*common, *(setting.replace("BASE", str(base)) for setting in settings)]


@pytest.mark.weekly
@pytest.mark.parametrize("case", RECIPES)
def test_recipes(case, base, data, tmp_path, run_recipe):
    """The export has our logits in transformers, and differs from the base."""
    recipe, settings = arguments(case, base, data)
    run = tmp_path / "run"
    module = __import__(recipe)
    assert run_recipe([*settings, f"output_dir={run}"], module) == 0
    assert COST in (run / "log.txt").read_text()
    assert all(torch.tensor(json.loads(line)["loss"]).isfinite() for line in (run / "metrics.jsonl").open())
    if case == "reward":
        model = load_model(run / "model", head="score")
        assert model.head.weight.shape[0] == 1
        return
    with torch.no_grad():
        expected = transformers_logits(run / "model")
        assert_close(load_model(run / "model")(TOKENS), expected, atol=1e-5, rtol=1e-5)
    if "distill" not in case or "nf4" in str(RECIPES[case]):  # the student is its own teacher
        assert (expected - transformers_logits(base)).abs().max() > 0


@pytest.mark.weekly
def test_run_checkpoints(base, data, tmp_path, run_recipe):
    """Open a checkpoint by step, export one, and average them."""
    recipe, settings = arguments("full", base, data)
    run = tmp_path / "run"
    assert run_recipe([*settings, "checkpointer.every=1", f"output_dir={run}"], __import__(recipe)) == 0
    main(["export", str(run), "--step", "1", "--to", "hf", "--out", str(tmp_path / "one")])
    main(["merge", str(run), str(tmp_path / "mean"), "--method", "average"])
    first, mean, last = (transformers_logits(folder) for folder in (tmp_path / "one", tmp_path / "mean", run / "model"))
    with torch.no_grad():
        assert_close(open_model(run, step=1).load()(TOKENS), first, atol=1e-5, rtol=1e-5)
    assert (first - last).abs().max() > 0
    assert_close(mean, (first + last) / 2, atol=1e-3, rtol=1e-3)


@pytest.mark.weekly
@pytest.mark.parametrize(
    "case", [case if case == "full" else pytest.param(case, marks=pytest.mark.weekly) for case in RECIPES]
)
def test_validate_and_plan(case, base, data, told, capsys):
    recipe, settings = arguments(case, base, data)
    assert told(recipe, settings) == ""
    capsys.readouterr()
    command = ["plan", recipe, *settings, "--world-size", "2", "--device", "h100", "--json"]
    main(command)
    shown = capsys.readouterr()
    assert json.loads(shown.out) and COST in shown.err

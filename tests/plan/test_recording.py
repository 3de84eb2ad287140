"""What is planned of a recipe's own step, against the storages of real steps, counted one by one; and of copies."""

import importlib
import json
import random
import shutil
from collections import defaultdict
from dataclasses import replace

import pytest
import transformers
from helpers import WORDS, save_checkpoint, weekly_but
from models.test_families import SMALL, VARIANTS
from validate.edits import RIGHT, applied

from tune import config
from tune.devices import DEVICES
from tune.errors import TuneError
from tune.generation import PREFILL_TOKENS
from tune.plan.planning import Job
from tune.plan.sampling import read_together
from tune.plan.trace import Recorder
from tune.tokenizers import Tokenizer

EXACT = replace(DEVICES["cpu"], reserve=0.0, reserve_share=0.0)
GRPO = config.find_recipe("grpo")
LENGTH, ROWS = 64, 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Answers that are longer than a row, by what a recipe reads."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    answers = [" ".join(draw.choices("abcdefgh", k=400)) for _ in range(2 * ROWS)]
    prompts = ["a", "a b"] * ROWS
    rows = {
        "pairs": [{"prompt": "a", "chosen": each, "rejected": each[::-1]} for each in answers],
        "labelled": [{"prompt": p, "completion": a, "label": p == "a"} for p, a in zip(prompts, answers, strict=True)],
        "text": [{"text": each} for each in answers],
    }
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return folder


TEACHER = ["teacher.path={other}", "teacher.dtype=fp32"]
CASES = {
    "one model": ("full_finetune", "text", []),
    "DPO": ("preference_finetune", "pairs", []),
    "DPO, its base": ("preference_finetune", "pairs", ["adapter.rank=4", "reference=adapter_off"]),
    "DPO, another model": ("preference_finetune", "pairs", ["reference={other}"]),
    "KTO": ("preference_finetune", "labelled", ["loss._component_=tune.losses.KTO", "dataset.kind=labelled"]),
    "reward": ("reward_finetune", "pairs", []),
    "reward, adapter": ("reward_finetune", "pairs", ["adapter.rank=4"]),
    "teacher": ("distill", "text", TEACHER),
    "teacher, stored": ("distill", "text", [*TEACHER, "teacher.top_k=8"]),
}


def length_modulo(row, completion):
    return float(len(completion) % 7)


TRAINING = ["micro_batch_size=8", "prompts_per_step=2", "group_size=8"]
ROLLOUT = ["micro_batch_size=1", "prompts_per_step=16", "group_size=4"]
SAMPLED = {
    "training": TRAINING,
    "KL to another model": [*TRAINING, "kl=0.1", "reference={other}"],
    "KL to its base": [*TRAINING, "kl=0.1", "adapter.rank=4", "reference=adapter_off"],
    "rollout": ROLLOUT,
    "rollout in parts": ["micro_batch_size=1", "prompts_per_step=3", "group_size=16", "sampling.max_rows=40"],
}
FAMILIES = ["gemma3_text", "gpt_oss", "qwen3_5_text", "deepseek_v3", "mixtral-window"]


@pytest.fixture
def of_family(request, checkpoint, tmp_path):
    config_class, changes = VARIANTS[request.param]
    return save_checkpoint(tmp_path / "model", config_class, **SMALL | changes | {"vocab_size": 300})


@pytest.mark.weekly
@pytest.mark.parametrize("name", SAMPLED)
def test_peak_of_completions(name, checkpoint, tmp_path, monkeypatch):
    more = SAMPLED[name]
    if any("{other}" in each for each in more):
        more = [each.format(other=save_checkpoint(tmp_path / "other", num_hidden_layers=6)) for each in more]
    compare_completions(checkpoint, tmp_path, monkeypatch, more, is_rollout=more[0] == "micro_batch_size=1")


@pytest.mark.weekly
def test_peak_of_a_policy_and_its_values(checkpoint, tmp_path, monkeypatch):
    more = ["micro_batch_size=8", "prompts_per_step=2", "samples_per_prompt=8"]
    compare_completions(checkpoint, tmp_path, monkeypatch, more, recipe="ppo_finetune")


@pytest.mark.slow
def test_peak_beside_a_reward_model(checkpoint, tmp_path, monkeypatch):
    shutil.copytree(checkpoint, judge := tmp_path / "judge")
    judged = transformers.AutoConfig.from_pretrained(judge, num_labels=1, pad_token_id=0, num_hidden_layers=6)
    transformers.AutoModelForSequenceClassification.from_config(judged).save_pretrained(judge)
    more = [*TRAINING, f"reward={{_component_: tune.generation.RewardModel, path: {judge}}}"]
    compare_completions(checkpoint, tmp_path, monkeypatch, more)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("of_family", "more"),
    [*((each, TRAINING) for each in FAMILIES), *((each, ROLLOUT) for each in ("gpt_oss", "qwen3_5_text"))],
    indirect=["of_family"],
)
def test_peak_of_completions_of_a_family(of_family, more, tmp_path, monkeypatch):
    # A delta net has its peak while prompts are read for the first time, when later layers have no cache yet.
    compare_completions(of_family, tmp_path, monkeypatch, more, rel=0.12 if more == ROLLOUT else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [4, 16])
def test_a_search_knows_what_groups_share(micro_batch_size, checkpoint):
    common = [f"model.path={checkpoint}", "dataset.path=x", "reward=plan.test_recording.length_modulo"]
    sizes = ["group_size=4", "prompts_per_step=4", "max_prompt_len=400", f"micro_batch_size={micro_batch_size}"]
    job = Job(
        config.load("grpo", [*common, *sizes, "sampling.max_new_tokens=20", "sampling.max_rows=4"]), EXACT, 1, GRPO
    )
    peaks = [job.plan(job.layout(), line).peak for line in (False, True)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def compare_completions(folder, tmp_path, monkeypatch, more, is_rollout=None, rel=0.05, recipe="grpo"):
    """The peak of a recipe that samples, where all prompts and all completions are as long as they may be."""
    draw, by_length, tokenizer = random.Random(0), defaultdict(list), Tokenizer(str(folder))
    for _ in range(1024):
        text = " ".join(draw.sample(WORDS, k=12))
        by_length[len(tokenizer.encode(text))].append(text)
    length, texts = max(by_length.items(), key=lambda each: len(each[1]))
    assert len({*texts}) == len(texts) > 32  # those of a step differ: equal ones would be read once
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    monkeypatch.setattr(Tokenizer, "stop_ids", frozenset())
    cfg = config.load(recipe, [
        f"model.path={folder}", f"dataset.path={tmp_path / 'prompts.jsonl'}", f"output_dir={tmp_path / 'run'}",
        f"max_prompt_len={length}", "sampling.max_new_tokens=40", "max_steps=2", "device=cpu", "compute.dtype=fp32",
        "reward=plan.test_recording.length_modulo", "checkpointer.async=false",
        *more,
    ])  # fmt: skip
    job = Job(cfg, EXACT, 1, config.find_recipe(recipe))
    plan, recorder = job.plan(job.layout()), Recorder(EXACT, "fp32", False)
    recorder._cost = lambda *_: None
    with recorder:
        importlib.import_module(f"recipes.{recipe}").main.__wrapped__(cfg)
    print(plan.moment, plan.peak / recorder.peak - 1)  # shown by -s
    # Ids and places of the step before, which are not planned, are up to 4% with such a small model.
    assert plan.peak == pytest.approx(recorder.peak, rel=rel), plan.peak / recorder.peak - 1
    assert is_rollout is None or (plan.moment == "rollout") == is_rollout


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("name", weekly_but([*CASES][:1], CASES))
def test_peak_of_counted_storages(name, checkpoint, texts, tmp_path):
    recipe, rows, more = CASES[name]
    if any("{other}" in each for each in more):
        more = [each.format(other=save_checkpoint(tmp_path / "other", num_hidden_layers=6)) for each in more]
    cfg = config.load(recipe, [
        f"model.path={checkpoint}", f"dataset.path={texts / rows}.jsonl", f"output_dir={tmp_path / 'run'}",
        f"max_seq_len={LENGTH}", f"micro_batch_size={ROWS}", f"global_batch_size={ROWS}", "max_steps=2", "device=cpu",
        "compute.dtype=fp32", "dataset.too_long=truncate", f"dataset.cache_dir={tmp_path}", "checkpointer.async=false",
        *more,
    ])  # fmt: skip
    job = Job(cfg, EXACT, 1, config.find_recipe(recipe))
    plan, recorder = job.plan(job.layout()), Recorder(EXACT, "fp32", False)
    recorder._cost = lambda *_: None
    with recorder:
        importlib.import_module(f"recipes.{recipe}").main.__wrapped__(cfg)
    assert plan.peak == pytest.approx(recorder.peak, rel=0.03), plan.peak / recorder.peak - 1


@pytest.fixture
def planned(checkpoint, tmp_path):
    """The plan of a copy of a recipe with these replacements, for so many processes."""

    def planned(recipe: str, *changes: tuple[str, str], more=(), device=EXACT):
        text = config.find_recipe(recipe).read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / "mine.py").write_text(text)
        given = [f"model.path={checkpoint}", "dataset.path=none", "compute.dtype=fp32", *more]
        job = Job(config.load(recipe, given), device, 1, tmp_path / "mine.py")
        return job.plan(job.layout())

    return planned


SFT = ["max_seq_len=64", "micro_batch_size=4", "global_batch_size=4"]
LOSS = "loss = model(micro_batch, loss_fn) / batch.num_supervised"


@pytest.mark.slow
def test_an_edited_step_is_what_is_planned(planned):
    """A forward more is half of a backward; what is kept of a second one is there twice."""
    one = planned("full_finetune", more=SFT)
    again = "with torch.no_grad():\n                    model(micro_batch, loss_fn)\n                " + LOSS
    watched = planned("full_finetune", (LOSS, again), more=SFT)
    assert watched.seconds["products"] == pytest.approx(4 / 3 * one.seconds["products"], rel=0.05)
    assert watched.memory["activations"] == one.memory["activations"]
    twice = planned("full_finetune", (LOSS, f"{LOSS} + model(micro_batch, loss_fn)"), more=SFT)
    assert twice.seconds["products"] == pytest.approx(2 * one.seconds["products"], rel=0.01)
    assert twice.memory["activations"] == pytest.approx(2 * one.memory["activations"], rel=0.05)
    assert twice.memory["weights"] == one.memory["weights"]


@pytest.mark.slow
def test_a_second_optimizer_is_no_second_update(planned):
    """As with one optimizer for each parameter."""
    one = planned("full_finetune", more=SFT)
    groups = "optimizers.parameter_groups(model, cfg.optimizer.lr, **cfg.parameter_groups)"
    halves = f"{groups}[:1])\n    other = instantiate(cfg.optimizer, {groups}[1:])"
    made = (f"instantiate(cfg.optimizer, {groups})", f"instantiate(cfg.optimizer, {halves}")
    stepped = ("                optimizer.step()", "                optimizer.step()\n                other.step()")
    two = planned("full_finetune", made, stepped, more=SFT)
    assert two.seconds["products"] == one.seconds["products"]


# Edits of the step or around it, whose plan is that of the unedited recipe.
PLANNED = [
    "try/continue around backward", "try: break", "with f(): continue", "match: continue", "for/else: continue",
    "future annotations", "main(cfg, log=print)", "if not isfinite: raise", "assert isfinite(grad_norm)",
    "main() without a guard", "try/finally around the loop", "decorator under the entry", "decorator above the entry",
    "loop in a helper", "try/except/else/finally", "best so far", "del and rebinding", "main in try/except",
    "assert on a made-up metric", "enumerated steps", "steps of a progress bar", "steps next to other items",
    "a table of losses",
]  # fmt: skip


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("name", weekly_but(["try/continue around backward", "loop in a helper"], PLANNED))
def test_edits_without_an_effect_on_memory_or_time_are_planned(name, planned, checkpoint, tmp_path):
    (tmp_path / "mine.py").write_text(applied(RIGHT[name]))
    given = [f"model.path={checkpoint}", "dataset.path=none", "compute.dtype=fp32", *SFT]
    job = Job(config.load("full_finetune", given), EXACT, 1, tmp_path / "mine.py")
    edited, plain = job.plan(job.layout()), planned("full_finetune", more=SFT)
    assert edited.peak == plain.peak
    assert sum(edited.seconds.values()) == pytest.approx(sum(plain.seconds.values()), rel=0.02)


def test_steps_that_a_plan_cannot_repeat_are_refused(planned):
    steps = "run.steps(data, checkpointer, evaluator, seed=cfg.seed)"
    loop = f"for step, batch in {steps}:"
    edited = f"steps = {steps}\n        while (item := next(steps, None)) is not None:\n            step, batch = item"
    with pytest.raises(TuneError, match=r"run\.steps"):
        planned(
            "full_finetune",
            (loop, edited),
            more=SFT,
        )


@pytest.mark.slow
def test_batches_that_no_loader_makes_are_refused(planned):
    own = """tokens = torch.ones(4, 64, dtype=torch.long)
        batch = datasets.GlobalBatch([], [Batch.of(tokens, tokens)], world.device, 256, 256, 0)
        for step, batch in run.steps([(1, batch), (2, batch)], checkpointer, evaluator, seed=cfg.seed):"""
    with pytest.raises(TuneError, match=r"mine\.py .*DataLoader"):
        planned(
            "full_finetune",
            ("import torch\n", "import torch\nfrom tune.collators import Batch\n"),
            ("for step, batch in run.steps(data, checkpointer, evaluator, seed=cfg.seed):", own),
            more=SFT,
        )


def test_prompts_that_are_read_together():
    assert read_together(4, PREFILL_TOKENS // 8) == 4
    assert read_together(16, PREFILL_TOKENS // 8) == 8
    assert read_together(4, PREFILL_TOKENS + 1) == 1  # one that is too long, alone


@pytest.mark.slow
def test_what_a_copy_raises_is_what_the_plan_says(planned):
    with pytest.raises(TuneError, match=r"mine\.py:\d+: AttributeError: .*backwards"):
        planned("full_finetune", ("loss.backward()", "loss.backwards()"), more=SFT)
    with pytest.raises(TuneError, match=r"not_there: mine\.py:\d+"):
        planned("full_finetune", ("instantiate(cfg.loss)", "instantiate(cfg.not_there)"), more=SFT)


@pytest.mark.slow
def test_answers_of_the_student(planned, checkpoint):
    """They are sampled before a step, whose rows are as long as without."""
    given = [*SFT, f"teacher.path={checkpoint}", "teacher.dtype=fp32", "on_policy.max_new_tokens=16"]
    off, half, on = (planned("distill", more=[*given, f"on_policy.share={share}"]) for share in (0, 0.5, 1))
    assert "rollout" not in off.seconds and on.seconds["rollout"] > half.seconds["rollout"] > 0
    assert on.tokens == off.tokens == 4 * 64


@pytest.mark.slow
def test_an_episode_has_as_many_turns_as_there_is_room_for(planned):
    more = ["prompts_per_step=2", "group_size=4", "micro_batch_size=2", "max_prompt_len=24", "reward=null"]
    more += ["sampling.max_new_tokens=40", "environment=recipes.test_grpo.Guess"]
    one, two, most = (planned("grpo", more=[*more, *turns]) for turns in (
        ["max_turns=1"], ["max_turns=2"], ["max_turns=9", "sampling.max_len=150"]
    ))  # fmt: skip
    assert one.tokens == 8 * (24 + 40 - 1) and two.tokens == most.tokens + 8 * (80 - 120) == 8 * (24 + 80 - 1)
    assert two.seconds["rollout"] > 1.9 * one.seconds["rollout"]

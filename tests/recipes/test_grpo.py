"""GRPO end to end: rising reward, logs, the same curve and samples in every layout, and wrong inputs."""

import functools
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import grpo
import ppo_finetune
import pytest
import torch
import transformers
from helpers import REFUSED_BY, WORDS, of_training, run_processes, save_checkpoint, weekly_but
from safetensors.torch import load_file

from tune.records import read
from tune.records.page import seconds

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")


def share_of_a(row, completion):
    """Return the share of the letter a in the completion: partial credit, so that few groups are dead."""
    return completion.count("a") / max(1, len(completion))


def always_one(row, completion):
    return 1.0


def odd_ones(row, completion):
    """Return a reward that makes the group of every second prompt dead."""
    return float(len(row["instruction"]) % 2 or len(completion) % 2)


NUMBERS = itertools.count()


def different(row, completion):
    """Return a different value for each completion, so that no group is dead."""
    return next(NUMBERS)


class Interrupts:
    """Send SIGTERM to the run while the second step of 16 completions is sampled."""

    def __init__(self):
        self.calls = 0

    def __call__(self, row, completion):
        self.calls += 1
        if self.calls == 17:
            os.kill(os.getpid(), signal.SIGTERM)
        return share_of_a(row, completion)


def fails(row, completion):
    return row["no such column"]


def gives_text(row, completion):
    return "good"


def gives_nan(row, completion):
    return float("nan")


class Guess:
    """Three guesses at a letter; each completion is a guess."""

    def start(self, row):
        self.turns = 0

    def step(self, message):
        self.turns += 1
        return message["content"].count("a") / 8, [{"role": "user", "content": "Once more!"}], self.turns == 3


class WithArguments(Guess):
    def __init__(self, length, *others, most=3, **options):
        pass


@pytest.fixture(scope="session")
def requests(tmp_path_factory):
    file = tmp_path_factory.mktemp("requests") / "requests.jsonl"
    file.write_text("".join(json.dumps({"instruction": f"Say {word}."}) + "\n" for word in WORDS))
    return file


def settings_of(checkpoint, requests):
    return [
        f"model.path={checkpoint}", f"dataset.path={requests}", "max_prompt_len=64",
        "reward=recipes.test_grpo.share_of_a", "sampling.max_new_tokens=12", "prompts_per_step=4", "group_size=8",
        "device=cpu", "compute.dtype=fp32", "optimizer.lr=3e-3", "max_steps=3",
    ]  # fmt: skip


@pytest.fixture
def run(run_recipe, checkpoint, requests, tmp_path):
    def run(*overrides, folder=tmp_path / "run", code=0):
        settings = [*settings_of(checkpoint, requests), f"output_dir={folder}", *overrides]
        assert run_recipe(settings, grpo) == code
        if code:
            return []
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return run


@pytest.mark.weekly
def test_reward_rises(run, requests, tmp_path):
    steps = run(
        "max_steps=24", "epochs=8", "optimizer.lr=1e-2", f"dataset.validation={requests}", "evaluate.first=true"
    )
    first, last = steps[1], steps[-1]
    assert last["reward"] > first["reward"] + 0.3
    assert last["validation_reward"] > steps[0]["validation_reward"] + 0.3
    assert all(abs(step["mismatch_kl"]) < 1e-5 for step in steps[1:] if step["dead_groups"] < 4)
    assert all(step["reward"] == pytest.approx(step["reward/share_of_a"]) for step in steps[1:])
    parts = seconds(read(tmp_path / "run"))  # "Where the time went" of the report
    assert parts["rollout"] == pytest.approx(sum(step["rollout_seconds"] for step in steps[1:]))
    assert min(parts["training"], parts["rollout"]) > 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 24 * 4 * 8
    of_step = [sample["reward"] for sample in samples if sample["step"] == 3]
    assert sum(of_step) / len(of_step) == pytest.approx(steps[3]["reward"])


@pytest.mark.slow
def test_transformers_model_samples_and_learns_the_same(run, tmp_path):
    (ours,), (theirs,) = (
        run("max_steps=1", f"model._component_=tune.models.{name}", folder=tmp_path / name) for name in ("build", "hf")
    )
    for name in ("loss", "reward", "grad_norm", "entropy", "completion_tokens"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-6), name


KL = ["adapter.rank=8", "kl=0.1", "reference=adapter_off"]


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize(
    "settings",
    weekly_but(
        [KL],
        [
            KL,
            ["loss._component_=tune.losses.ClippedPolicy", "updates=2", "baseline=leave_one_out"],
            ["loss._component_=tune.losses.ClippedPolicy", "mask_truncated=true", "sampling.stop_strings=[a]"],
            [
                "loss._component_=tune.losses.GSPO",
                "mask_truncated=true",
                "dynamic_sampling=2",
                "sampling.stop_strings=[a]",
            ],
            ["loss._component_=tune.losses.GSPO", "updates=2", "sampling.stop_strings=[a]"],
            ["kl=0.05", "sampling.temperature=0.7", "micro_batch_size=5"],
            ["prompts_per_step=1"],
        ],
    ),
)
def test_options(settings, run):
    steps = run(*settings)
    assert len(steps) == 3 and all(step["dead_groups"] <= 4 for step in steps)


def rows(folder):
    """Return the rows of samples.jsonl, in the order of the run."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["step"], line["sample"]))


def assert_same_run(folder, plain):
    """Assert the same tokens and one curve. Scores of a sharded reward model differ in their last bits."""
    actual, expected = rows(folder), rows(plain)
    exactly = "RewardModel" not in expected[0]
    names = ("reward", "RewardModel")
    scores = [[row.pop(name) for row in samples for name in names if name in row] for samples in (actual, expected)]
    assert actual == expected
    assert scores[0] == pytest.approx(scores[1], rel=0, abs=0 if exactly else 1e-6)
    ours, theirs = ([json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (folder, plain))
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss", "reward", "dead_groups", "supervised_tokens", "entropy", "kl", "validation_reward"):
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-5, abs=1e-5), name
        assert of_training(one) == of_training(other)
        assert one.get("grad_norm", 0) == pytest.approx(other.get("grad_norm", 0), rel=1e-3)


METHODS = {
    "plain": [],
    "dynamic": ["dynamic_sampling=2", "reward=recipes.test_grpo.odd_ones", "baseline=leave_one_out"],
    "kl": ["adapter.rank=4", "adapter.dropout=0.1", "kl=0.1", "reference=adapter_off", "sampling.temperature=0.8"],
    "environment": ["environment=recipes.test_grpo.Guess", "sampling.stop_strings=[a,e]", "max_turns=3"],
}
WAYS = {
    "micro-batches of 1": ["micro_batch_size=1"],
    "5 rows at a time": ["micro_batch_size=5", "sampling.max_rows=5"],
    "recomputed, small chunks": ["compute.activation_checkpointing=full", "loss_chunk_tokens=7"],
}
SMALL = ["optimizer.lr=1e-3", "sampling.max_new_tokens=8", "group_size=4"]


@pytest.fixture(scope="module")
def alone(run_recipe, checkpoint, requests, tmp_path_factory):
    """Function that returns the folder of a method's run in one process, and the common settings."""
    folder = tmp_path_factory.mktemp("alone")
    common = [*settings_of(checkpoint, requests), *SMALL, f"dataset.validation={requests}"]

    @functools.cache
    def alone(method, *settings):
        settings = settings or METHODS[method]
        assert run_recipe([*common, *settings, f"output_dir={folder / method}"], grpo) == 0
        return folder / method

    return alone, common


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("method", weekly_but(["plain", "environment"], ["plain", "dynamic", "kl", "environment"]))
def test_samples_and_curve_do_not_depend_on_micro_batches(method, alone, run_recipe, tmp_path):
    folder_of, common = alone
    for way, settings in WAYS.items():
        assert run_recipe([*common, *METHODS[method], *settings, f"output_dir={tmp_path / way}"], grpo) == 0
        assert_same_run(tmp_path / way, folder_of(method))


@pytest.mark.slow
def test_samples_and_curve_are_the_same_on_two_processes(alone, run_recipe, checkpoint, tmp_path):
    """This holds for a reward model that is sharded like the policy, too."""
    folder_of, common = alone
    judge = tmp_path / "judge"
    shutil.copytree(checkpoint, judge)
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(judge, num_labels=1, pad_token_id=0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    judged = [f"reward={{_component_: tune.generation.RewardModel, path: {judge}, micro_batch_size: 3}}"]
    judged_layouts = {
        f"judged, {axis}": [*judged, f"parallel.{axis}=2", *more]
        for axis, more in {"dp_shard": [], "tp": [], "cp": [], "dp_replicate": ["micro_batch_size=3"]}.items()
    }
    assert run_recipe([*common, "adapter.rank=4", f"output_dir={tmp_path / 'adapted'}"], grpo) == 0
    continued = [f"adapter.path={tmp_path / 'adapted' / 'adapter'}", "kl=0.1", "parallel.zero_stage=2"]
    # With dropout; test_method_layouts.py has the other methods.
    kl = {"kl": METHODS["kl"], "continued": continued, "continued, tp": [*continued, "parallel.tp=2"]}
    layouts = {
        "two copies of the model": [*METHODS["plain"], "parallel.dp_replicate=2", "micro_batch_size=3"],
        "heads shared": [*METHODS["plain"], "parallel.tp=2"],
        "tokens shared": [*METHODS["plain"], "parallel.cp=2"],
    }
    run_processes(RUN_VARIANTS, 2, "grpo", str(tmp_path), json.dumps(common), json.dumps(kl | layouts | judged_layouts))
    assert_same_run(tmp_path / "kl", folder_of("kl"))
    for name in ("continued", "continued, tp"):
        assert_same_run(tmp_path / name, folder_of("continued", *continued))
    for name in judged_layouts:
        assert_same_run(tmp_path / name, folder_of("judged", *judged))
    for name in layouts:
        assert_same_run(tmp_path / name, folder_of("plain"))


@pytest.mark.slow
def test_methods_do_what_their_names_say(alone):
    """Check that the runs above use the method in their names."""
    folder_of, _ = alone
    episodes = rows(folder_of("environment"))
    turns = [sum(token == 1 for token in episode["tokens"]) // 2 for episode in episodes]  # <|im_start|>, not sampled
    assert max(turns) >= 1
    assert all(episode["reward"] == episode["environment"] + episode["share_of_a"] for episode in episodes)
    for step in map(json.loads, (folder_of("environment") / "metrics.jsonl").open()):
        rewards = [episode["environment"] for episode in episodes if episode["step"] == step["step"]]
        assert step["reward/environment"] == pytest.approx(sum(rewards) / len(rewards))
        assert "validation_reward/environment" in step or step["step"] < 3
    texts = [row["text"] for row in rows(folder_of("plain"))]
    assert len({*texts}) > len(texts) / 2
    dead = [json.loads(line)["dead_groups"] for line in (folder_of("dynamic") / "metrics.jsonl").open()]
    prompts = {row["sample"] // 4 for row in rows(folder_of("dynamic"))}
    assert max(prompts) >= 12, "no group was replaced"
    assert sum(dead) < len(prompts)


@pytest.mark.slow
def test_conversations_that_outgrow_the_model_are_counted(run, tmp_path):
    short = save_checkpoint(tmp_path / "short", max_position_embeddings=64)
    environment = [f"model.path={short}", *METHODS["environment"], "group_size=4", "mask_truncated=true"]
    run(*environment, code=2)  # all completions whose rewards differ are truncated
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    for step in steps:
        of_step = [row for row in rows(tmp_path / "run") if row["step"] == step["step"]]
        assert step["without_room"] == sum(row["finish"] == "room" for row in of_step)
        assert step["truncated_share"] == sum(row["finish"] != "stop" for row in of_step) / 16
    assert sum(step["without_room"] for step in steps) > 0


@pytest.mark.slow
def test_log_states_the_number_of_steps(run, tmp_path):
    """The log warns if the epochs end before max_steps."""
    run("max_steps=9")
    log_text = (tmp_path / "run" / "log.txt").read_text()
    assert "5 steps, 5 an epoch" in log_text
    assert "max_steps=9 is not reached: epochs=1 ends " in log_text


@pytest.mark.slow
def test_report_names_the_data(run, tmp_path):
    run("max_steps=1")
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    assert data["source"].endswith("requests.jsonl") and data["kept"] == data["rows"] > 0
    page = (tmp_path / "run" / "report.html").read_text().split("<h2>On what</h2>")[1]
    assert "requests.jsonl" in page.split("</section>")[0] and "learned" not in page.split("</section>")[0]


@pytest.mark.slow
def test_dynamic_sampling_trains_on_more_live_groups(run, tmp_path):
    reward = ["reward=recipes.test_grpo.odd_ones", *SMALL]
    plain, dynamic = (
        sum(step["dead_groups"] for step in run(*reward, f"dynamic_sampling={times}", folder=tmp_path / str(times)))
        for times in (0, 3)
    )
    assert plain > dynamic
    assert len(rows(tmp_path / "3")) == len(rows(tmp_path / "0")) == 3 * 4 * 4  # the same number of groups


@pytest.mark.slow
def test_run_with_only_dead_groups_exports_nothing(run_recipe, checkpoint, requests, tmp_path, capsys):
    """A second start exports nothing either: the checkpoint records that nothing was learned."""
    dead = ["reward=recipes.test_grpo.always_one", "dynamic_sampling=1", f"output_dir={tmp_path / 'run'}"]
    schedule = ["schedule._component_=tune.optimizers.linear", "checkpointer.every=1"]
    for _ in range(2):
        assert run_recipe([*settings_of(checkpoint, requests), *dead, *schedule], grpo) == 2
        assert "no token was supervised" in capsys.readouterr().err and not (tmp_path / "run" / "model").exists()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    names = ("dead_groups", "all_right_groups", "all_wrong_groups")
    assert [[step[name] for name in names] for step in steps] == [[4, 4, 0]] * 3
    assert all(step["supervised_tokens"] == 0 and "loss" not in step for step in steps)
    assert [step["lr"] for step in steps] == pytest.approx([steps[0]["lr"] * share for share in (1, 2 / 3, 1 / 3)])


@pytest.mark.slow
def test_truncated_completions_are_compared_but_not_learned(run, tmp_path):
    (step,) = run("mask_truncated=true", "max_steps=1", "sampling.stop_strings=[a]")
    samples = rows(tmp_path / "run")
    groups = [samples[at : at + 8] for at in range(0, 32, 8)]
    live = [sample for group in groups if len({sample["reward"] for sample in group}) > 1 for sample in group]
    assert {sample["finish"] for sample in live} == {"stop", "length"}
    assert step["supervised_tokens"] == sum(len(sample["tokens"]) for sample in live if sample["finish"] == "stop")
    (whole,) = run("max_steps=1", "sampling.stop_strings=[a]", folder=tmp_path / "whole")
    assert whole["supervised_tokens"] == sum(len(sample["tokens"]) for sample in live)


@pytest.mark.parametrize(("baseline", "kl"), [("mean", 0.3), ("leave_one_out", 0.0)])
def test_loss_matches_its_formula(baseline, kl, run, checkpoint, tmp_path):
    """The gradient matches, too. The loss is A log p plus the KL divergence, with log-probs from transformers."""
    import transformers

    other = save_checkpoint(tmp_path / "other", initializer_range=0.08)
    plain = ["max_steps=1", "optimizer._component_=torch.optim.SGD", "max_grad_norm=1e9"]
    (step,) = run(f"baseline={baseline}", f"kl={kl}", *([f"reference={other}"] if kl else []), *plain)
    samples = rows(tmp_path / "run")
    reference = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    total, count, entropies, divergences = torch.zeros(()), 0, [], []
    for at in range(0, len(samples), 8):
        group = samples[at : at + 8]
        values = [sample["reward"] for sample in group]
        for sample in group:
            others = [value for other, value in zip(group, values, strict=True) if other is not sample]
            mean = sum(others) / 7 if baseline == "leave_one_out" else sum(values) / 8
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": sample["row"]["instruction"]}], add_generation_prompt=True, tokenize=False
            )
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            logits = model(torch.tensor([[*prompt, *sample["tokens"]]])).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1).gather(1, torch.tensor(sample["tokens"])[:, None])
            entropies += torch.distributions.Categorical(logits=logits.detach()).entropy().tolist()
            total = total - (sample["reward"] - mean) * log_probs.sum()
            if kl and len(set(values)) > 1:
                with torch.no_grad():
                    theirs = reference(torch.tensor([[*prompt, *sample["tokens"]]])).logits[0, len(prompt) - 1 : -1]
                    theirs = theirs.log_softmax(-1).gather(1, torch.tensor(sample["tokens"])[:, None])
                ratio = theirs - log_probs
                divergences += (ratio.exp() - 1 - ratio)[:, 0].tolist()
                total = total + kl * (ratio.exp() - 1 - ratio).sum()
            count += len(sample["tokens"])
    loss = total / count
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert step["supervised_tokens"] == count
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert step["entropy"] == pytest.approx(sum(entropies) / count, rel=1e-5)
    if kl:
        assert step["kl"] == pytest.approx(sum(divergences) / count, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "counts"), [(grpo, ["group_size=4"]), (ppo_finetune, ["prompts_per_step=16"])], ids=["grpo", "ppo"]
)
def test_interrupted_run_resumes_bitwise(recipe, counts, run_recipe, checkpoint, requests, tmp_path):
    """The interrupted run saves the current step and logs it."""
    settings = [setting for setting in settings_of(checkpoint, requests) if "group_size" not in setting]
    common = [*settings, *counts, "epochs=3", "updates=1", "checkpointer.every=null", "sampling.max_new_tokens=6"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert run_recipe([*common, f"output_dir={whole}"], recipe) == 0
    common.append("reward=recipes.test_grpo.Interrupts")
    assert run_recipe([*common, f"output_dir={parted}"], recipe) == 130
    assert "interrupted: step 2 is saved" in (parted / "log.txt").read_text()
    assert run_recipe([*common, f"output_dir={parted}"], recipe) == 0
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (parted, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [row["tokens"] for row in rows(parted)] == [row["tokens"] for row in rows(whole)]


@pytest.mark.parametrize(("reward", "message"), [("fails", "KeyError"), ("gives_text", "'good'"), ("gives_nan", "nan")])
def test_failing_reward_is_named(reward, message, run, capsys):
    run(f"reward=recipes.test_grpo.{reward}", code=2)
    error = capsys.readouterr().err
    assert f"reward: {reward}" in error and message in error


HERE = "recipes.test_grpo"
WRONG = {
    "no module": (["reward=my_rewardz.is_right"], "there is no module 'my_rewardz'"),
    "no function": ([f"reward={HERE}.share_of_b"], "has no 'share_of_b'. Did you mean 'share_of_a'?"),
    "no component": (["reward={weight: 2}"], "a component with keys as reward._component_"),
    "twice": (
        [f"reward=[{HERE}.share_of_a, {HERE}.share_of_a]"],
        "reward: two functions have the name share_of",
    ),
    "weight": ([f"reward=[{{_component_: {HERE}.share_of_a, weight: much}}]"], "reward.weight: 'much' is not a number"),
    "weights of 0": (
        [f"reward={{_component_: {HERE}.share_of_a, weight: 0}}"],
        "reward: all weights are 0",
    ),
    "argument": ([f"reward={{_component_: {HERE}.share_of_a, most: 2}}"], "reward: invalid arguments for share_of_a"),
    "number": (["reward=3"], "reward: '3' is not"),
    "group of one": (["group_size=1"], "group_size: 1 is below 2"),
    "greedy": (["sampling.temperature=0"], "sampling.temperature: 0 is not a positive number"),
    "top_p": (["sampling.top_p=2"], "sampling.top_p: 2"),
    "baseline": (["baseline=median"], "baseline: 'median' is not one of mean, leave_one_out"),
    "negative KL": (["kl=-1"], "kl: -1 is below 0"),
    "no adapter": (["kl=0.1", "reference=adapter_off"], "Set reference=null"),
    "no reference": (["kl=0.1", "reference=./nowhere"], "nowhere"),
    "too many prompts": (["prompts_per_step=400"], "prompts_per_step=400 exceeds the 22"),
    "too long": (["max_prompt_len=2"], "no prompt is left of 22 rows"),
    "columns": (["dataset.columns={instruction: question}"], "requests.jsonl:1"),
    "no environment": ([f"environment={HERE}.Gues"], f"environment: {HERE} has no 'Gues'. Did you mean 'Guess'?"),
    "an environment of arguments": (
        [f"environment={HERE}.WithArguments"],
        "WithArguments is called without arguments: missing a required argument: 'length'",
    ),
    "positions": (["sampling.max_new_tokens=600"], "limit (512)"),
}


@pytest.mark.parametrize(*REFUSED_BY)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings(case, by, run, checkpoint, requests, told, tmp_path, capsys):
    settings, message = WRONG[case]
    if by == "validate":
        all_settings = [*settings_of(checkpoint, requests), f"output_dir={tmp_path / 'run'}", *settings]
        assert message in " ".join(told("grpo", all_settings).split())
        return
    run(*settings, code=2)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_wrong_data(run, checkpoint, requests, told, tmp_path, capsys):
    text, answers, template = tmp_path / "text.jsonl", tmp_path / "answers.jsonl", "tokenizer.chat_template=plain"
    text.write_text('{"prompt": "the cat"}\n' * 4)
    answers.write_text('{"messages": [{"role": "assistant", "content": "Yes."}]}\n')
    for settings, message in (
        ([f"dataset.path={text}", "environment=recipes.test_grpo.Guess"], "environment: prompts must be conversations"),
        ([f"dataset.path={answers}", template], "answers.jsonl:1: messages contains only answers"),
    ):
        assert message in " ".join(told("grpo", [*settings_of(checkpoint, requests), *settings]).split())
        run(*settings, code=2)
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_model_without_a_chat_template(run, checkpoint, tmp_path, capsys):
    folder = tmp_path / "base"
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "chat_template.jinja":
            text = file.read_bytes()
            (folder / file.name).write_bytes(text)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    run(f"model.path={folder}", code=2)
    assert "chat_template" in capsys.readouterr().err
    assert run(f"model.path={folder}", "tokenizer.chat_template=chatml", "max_steps=1", folder=tmp_path / "with")


@pytest.mark.slow
def test_several_rewards_with_weights(run, tmp_path):
    weighted = {"odd_ones": 0.5, "always_one": 0}
    others = ", ".join(f"{{_component_: {HERE}.{name}, weight: {weight}}}" for name, weight in weighted.items())
    (step,) = run(f"reward=[{HERE}.share_of_a, {others}]", "max_steps=1")
    assert step["reward"] == pytest.approx(step["reward/share_of_a"] + 0.5 * step["reward/odd_ones"])
    assert step["reward/always_one"] == 1
    assert all(row["reward"] == row["share_of_a"] + 0.5 * row["odd_ones"] for row in rows(tmp_path / "run"))


@pytest.mark.slow
def test_references_agree(run, checkpoint, tmp_path):
    """A folder as the reference is the base without its adapter."""
    lora = ["adapter.rank=4", "kl=0.1", "optimizer.lr=1e-2"]
    off, folder = (
        run(*lora, f"reference={reference}", folder=tmp_path / str(number))
        for number, reference in enumerate(("adapter_off", checkpoint))
    )
    assert off[0]["kl"] == pytest.approx(0, abs=1e-6) and off[-1]["kl"] > 1e-4
    for one, other in zip(off, folder, strict=True):
        assert one["kl"] == pytest.approx(other["kl"], abs=1e-6)
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)


@pytest.mark.weekly
@pytest.mark.parametrize("trained", [[], ["adapter.modules_to_save=[norm]"], ["adapter.dora=true"]])
def test_reference_of_a_continued_adapter_is_the_starting_model(trained, run, tmp_path):
    """A folder with the merged model as the reference gives the same numbers."""
    run("adapter.rank=4", "optimizer.lr=1e-2", "export.merge=true", *trained, folder=tmp_path / "first")
    again = [f"adapter.path={tmp_path / 'first' / 'adapter'}", "kl=0.1", "optimizer.lr=1e-2"]
    plain = run(*again, folder=tmp_path / "start")
    merged = run(*again, f"reference={tmp_path / 'first' / 'model'}", folder=tmp_path / "merged")
    assert plain[0]["kl"] == pytest.approx(0, abs=1e-7) and plain[-1]["kl"] > 1e-4
    for one, other in zip(plain, merged, strict=True):
        assert one["kl"] == pytest.approx(other["kl"], rel=1e-3, abs=1e-6)
        assert one["reward"] == other["reward"]


@pytest.mark.slow
def test_quantized_base(run, tmp_path):
    steps = run("adapter.rank=4", "model.quantization=nf4", "kl=0.1", "reference=adapter_off")
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert all(abs(step["mismatch_kl"]) < 1e-5 for step in steps)
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_mixture_of_experts(run, tmp_path):
    experts = save_checkpoint(
        tmp_path / "model", "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, head_dim=16,
        moe_intermediate_size=32, num_hidden_layers=2,
    )  # fmt: skip
    steps = run(f"model.path={experts}")
    assert all("expert_load" in step and abs(step["mismatch_kl"]) < 1e-5 for step in steps)


@pytest.mark.parametrize("verb", ["preview", "prepare"])
def test_prompts_are_shown(verb, checkpoint, requests, capsys):
    from tune.cli import main

    main([verb, "grpo", *settings_of(checkpoint, requests), f"dataset.validation={requests}"])
    output = capsys.readouterr().out
    assert output.count("22 prompts of") == 2
    assert ("<|im_start|>user\nSay the.<|im_end|>\n<|im_start|>assistant\n" in output) == (verb == "preview")

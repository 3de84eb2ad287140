"""Every request gets the numbers of lm-evaluation-harness's `HFLM`."""

import json
from pathlib import Path

import pytest
import torch
from evaluation.task_files import write_tasks
from helpers import WORDS, run_processes, save_checkpoint, weekly_but
from tokenizers import Tokenizer, processors

from tune import distributed
from tune.errors import TuneError
from tune.evaluation import Tasks, log_likelihoods, metrics
from tune.peft import open_model

lm_eval = pytest.importorskip("lm_eval")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

NAMES = ["choice", "letters", "answer", "rolling"]
LONG = " ".join(WORDS * 12)  # more tokens than the models can read


@pytest.fixture(scope="module")
def world():
    return distributed.init("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, dict[str, str]]:
    """The arguments of `HFLM` by the name of the model."""
    home = tmp_path_factory.mktemp("models")
    short = {"max_position_embeddings": 128}
    llama = save_checkpoint(home / "llama", **short)
    arguments = {
        "llama": {"pretrained": llama},
        "gemma2": {
            "pretrained": save_checkpoint(home / "gemma2", "Gemma2Config", head_dim=16, pad_token_id=None, **short)
        },
        "qwen3_moe": {
            "pretrained": save_checkpoint(
                home / "moe",
                "Qwen3MoeConfig",
                head_dim=16,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                **short,
            )
        },
        "of transformers alone": {"pretrained": save_checkpoint(home / "gpt_neox", "GPTNeoXConfig", **short)},
        "adapter": {"pretrained": llama, "peft": make_adapter(llama, home / "adapter")},
        "with BOS": {"pretrained": save_checkpoint(home / "bos", **short)},
    }
    file = home / "bos" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    bos = "<|endoftext|>"
    special = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", special)
    tokenizer.save(str(file))
    return {name: {key: str(value) for key, value in options.items()} for name, options in arguments.items()}


def make_adapter(base: Path, folder: Path) -> Path:
    """Save a nonzero adapter with PEFT."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return folder


def both(arguments, world):
    """Our model and the HFLM of the same checkpoint."""
    from lm_eval.models.huggingface import HFLM

    from tune.evaluation.harness import HarnessModel

    adapters = [arguments["peft"]] if "peft" in arguments else []
    opened = open_model(arguments["pretrained"], adapters=adapters)
    model, tokenizer = opened.load(), opened.tokenizer()
    # The cache of HFLM gives wrong numbers if two requests split the same tokens at different places.
    theirs = HFLM(**arguments, device="cpu", dtype="float32", batch_size=3, logits_cache=False)
    return HarnessModel(model, tokenizer, world, None, None), theirs


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, request, index) for index, request in enumerate(arguments)]


def flat(value) -> list:
    """The numbers and texts in nested lists."""
    return [item for part in value for item in flat(part)] if isinstance(value, list | tuple) else [value]


def assert_same(ours, theirs) -> None:
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        assert one == (pytest.approx(other, rel=1e-6, abs=1e-4) if isinstance(other, float) else other)


PAIRS = {
    "plain": ("the cat", " sat on"),
    "blank at the end of the context": ("the cat ", "sat on"),
    "two of them": ("the cat  ", " sat"),
    "line break": ("the cat\n", "sat"),
    "empty context": ("", "the cat sat"),
    "empty context, one token": ("", "a"),
    "empty context, begins with BOS": ("", "<|endoftext|>the cat"),
    "BOS in the context": ("<|endoftext|>the cat", " sat"),
    "one token": ("the dog", " ran"),
    "another for the same context": ("the dog", " sat"),
    "a context that is another's start": ("the dog ran", " on"),
    "the same twice": ("the dog", " ran"),
    "a word that the two share": ("the c", "at sat on the mat"),
    "cut from the left": (LONG, " sat on"),
    "the tokens of another, divided elsewhere": ("<|endoftext|>the cat", " ran"),
    "as long as can be read": ("the", LONG[: len(LONG) // 12]),
    "unicode": ("naïve 🙂", " ünï🙂"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "of transformers alone", "adapter", "with BOS"])
def test_requests_match_hflm(name, models, world):
    ours, theirs = both(models[name], world)
    assert ours.max_length == theirs.max_length == 128
    assert ours.prefix_token_id == theirs.prefix_token_id and ours.eot_token_id == theirs.eot_token_id
    requests = instances("loglikelihood", PAIRS.values())
    expected = theirs.loglikelihood(requests)
    assert_same(ours.loglikelihood(requests), expected)
    for batch_size in (1, 5):
        ours.batch_size = batch_size
        assert_same(ours.loglikelihood(requests), expected)
    texts = instances("loglikelihood_rolling", [("the cat",), (LONG,), ("a",), (f"{LONG} {LONG}",)])
    assert_same(ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts))
    settings = [{"until": ["a"], "max_gen_toks": 9}, {"until": "\n"}, {"until": [], "max_new_tokens": 5}]
    prompts = [context for context, _ in PAIRS.values() if context]
    wanted = [(prompt, settings[0]) for prompt in prompts] + [(prompt, settings[2]) for prompt in prompts[:3]]
    generated = instances("generate_until", wanted)
    assert ours.generate_until(generated) == theirs.generate_until(generated)


def test_greedy_continuations_are_marked(models, world):
    """Greedy means that the model would have generated the continuation."""
    ours, theirs = both(models["llama"], world)
    with torch.no_grad():
        ids = ours.tok_encode("the cat")
        for _ in range(4):
            ids.append(int(ours.model(torch.tensor([ids]))[0, -1].argmax()))
    context, own = ids[:-4], ids[-4:]
    scores = log_likelihoods(ours.model, [(context, own), (context, own[::-1]), (context, own[:1])], world, 128)
    assert [greedy for _, greedy in scores] == [True, False, True]
    expected = theirs._loglikelihood_tokens(
        [(None, context, own), (None, context, own[::-1]), (None, context, own[:1])]
    )
    assert_same(scores, expected)


def test_empty_and_too_long_continuations(models, world):
    ours, _ = both(models["llama"], world)
    assert log_likelihoods(ours.model, [([5], []), ([5], [6])], world, 128)[0] == (0.0, True)
    assert log_likelihoods(ours.model, [], world, 128) == []
    with pytest.raises(TuneError, match="a continuation has 129 tokens, more than max_length=128"):
        log_likelihoods(ours.model, [([5], [6] * 129)], world, 128)
    with pytest.raises(TuneError, match="request 1 has no context"):
        log_likelihoods(ours.model, [([5], [6]), ([], [6, 7])], world, 128)


def test_common_contexts_of_choices_are_read_once(models, world, monkeypatch):
    model = open_model(models["llama"]["pretrained"]).load()
    long, other = [*range(5, 65)], [*range(40, 90)]
    requests = [(long, [7, 8]), (other, [3]), (long, [9]), (long, [7, 5, 6]), (other, [4, 4, 2]), (long, [8, 8])]
    alone = [log_likelihoods(model, [request], world, 128)[0] for request in requests]
    read, embed = [], model.embed
    monkeypatch.setattr(model, "embed", lambda tokens: read.append(tokens.numel()) or embed(tokens))
    together = log_likelihoods(model, requests, world, 128)
    assert sum(read) == 59 + (2 + 1 + 3 + 2) + 49 + (1 + 3)
    for score, expected in zip(together, alone, strict=True):
        assert score == pytest.approx(expected, abs=1e-4)


def test_context_of_blanks_is_empty(models, world):
    """`HFLM` fails for such contexts."""
    ours, _ = both(models["llama"], world)
    (score,) = ours.loglikelihood(instances("loglikelihood", [("  ", "the cat")]))
    (expected,) = ours.loglikelihood(instances("loglikelihood", [("", "  the cat")]))
    assert score == expected


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("chat", [{}, {"apply_chat_template": True, "num_fewshot": 2}], ids=["plain", "chat"])
@pytest.mark.parametrize("name", weekly_but(["llama"], ["llama", "adapter", "with BOS"]))
def test_whole_tasks_match_the_harness(name, chat, models, folder, world):
    ours, lm = both(models[name], world)
    tasks = Tasks(NAMES, ours.tokenizer, str(folder), **chat)
    results = tasks(ours.model, world, source=models[name]["pretrained"], log_samples=True)
    theirs = lm_eval.simple_evaluate(lm, tasks=[*tasks.tasks], task_manager=tasks.manager, **chat)
    for task in NAMES:
        for one, other in zip(results["samples"][task], theirs["samples"][task], strict=True):
            assert one["arguments"] == other["arguments"]
            assert_same(one["resps"], other["resps"])
    assert metrics(results, world) == pytest.approx(metrics(theirs, world), rel=1e-4)
    assert len(metrics(results, world)) == 6
    assert theirs.keys() <= results.keys()
    for key in ("configs", "versions", "n-shot", "higher_is_better", "n-samples", "tokenizer_eos_token", "max_length"):
        assert json.dumps(results[key], default=str) == json.dumps(theirs[key], default=str), key
    assert results["chat_template"] == (ours.tokenizer.chat_template if chat else None)


@pytest.mark.slow
def test_git_is_silent_outside_a_repository(models, folder, world, tmp_path, monkeypatch, capfd):
    ours, _ = both(models["llama"], world)
    tasks = Tasks(["letters"], ours.tokenizer, str(folder), limit=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert tasks(ours.model, world, bootstrap_iters=0)["git_hash"] is None
    assert "git" not in capfd.readouterr().err


@pytest.mark.weekly
def test_task_names_may_be_patterns_groups_and_files(models, folder, world, tmp_path):
    """Names select one task, several tasks, a group or a file."""
    ours, _ = both(models["llama"], world)
    (tmp_path / "pair.yaml").write_text(
        "group: pair\ntask: [choice, letters]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    for name in ("choice", "letters"):
        (tmp_path / f"{name}.yaml").write_text((folder / f"{name}.yaml").read_text())

    def named(*names):
        return Tasks(names, ours.tokenizer, str(tmp_path))

    assert [task.task_name for task in named("choic*").tasks] == ["choice"]
    assert [task.task_name for task in named(str(folder / "rolling.yaml")).tasks] == ["rolling"]
    scores = metrics(named("pair")(ours.model, world), world)
    weighted = (13 * scores["choice/acc"] + 5 * scores["letters/acc"]) / 18
    assert scores["pair/acc"] == pytest.approx(weighted) and "pair" not in scores
    higher_is_better = named("pair", str(folder / "rolling.yaml")).higher_is_better
    assert (
        higher_is_better["pair/acc"] is higher_is_better["letters/acc"] is True
        and higher_is_better["rolling/bits_per_byte"] is False
    )
    (tmp_path / "own.py").write_text("def results(row, found):\n    return {'length': len(found[0])}\n")
    body = (folder / "answer.yaml").read_text().replace("task: answer", "task: own")
    (tmp_path / "own.yaml").write_text(body + "process_results: !function own.results\n")
    filtered = "filter_list: [{name: first, filter: [{function: take_first}]}]\n"
    (tmp_path / "answer.yaml").write_text(body.replace("task: own", "task: answer") + filtered)
    scores = metrics(named("own", "answer")(ours.model, world), world)
    higher_is_better = named("own", "answer").higher_is_better
    assert scores.keys() == {
        "own/length",
        "answer/exact_match,first",
    }  # only the task's own code knows the names of its metrics
    assert higher_is_better.keys() == {"own/", "own/exact_match", "answer/exact_match,first"}


def test_chat_template_with_a_started_answer(models, world):
    ours, theirs = both(models["llama"], world)
    for begun in ("The answer is", "The answer is "):
        chat = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": begun}]
        assert ours.apply_chat_template(chat, False) == theirs.apply_chat_template(chat, False)
    assert ours.apply_chat_template(chat[:1]) == theirs.apply_chat_template(chat[:1])


@pytest.mark.weekly
def test_two_processes_share_the_requests(models, folder, world, tmp_path):
    script = Path(__file__).with_name("shared_requests.py")
    run_processes(script, 2, models["llama"]["pretrained"], str(folder), str(tmp_path / "out"))
    shared = json.loads((tmp_path / "out").read_text())
    ours, _ = both(models["llama"], world)
    alone = Tasks(NAMES, ours.tokenizer, str(folder))(ours.model, world, log_samples=True)["samples"]
    for kind in ("copies", "sharded"):
        for name in NAMES:
            assert_same(shared[kind][name], [sample["resps"] for sample in alone[name]])

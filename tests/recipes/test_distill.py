"""Distillation end to end: against a transformers loop, in every layout, resumed, and with wrong teachers."""

import json
import shutil
from pathlib import Path

import distill
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import REFUSED_BY, curve_steps, run_processes, save_checkpoint, slow_but, weekly_but

from tune import config
from tune.checkpointers import load_model
from tune.cli import main as tune
from tune.datasets import DataLoader, load
from tune.errors import TuneError
from tune.generation import Sampler
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")
RUN_VARIANTS = Path(__file__).with_name("run_variants.py")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A teacher whose family and width differ from the student's."""
    folder = tmp_path_factory.mktemp("teacher")
    return save_checkpoint(folder, "Qwen3Config", head_dim=16, hidden_size=128, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def common(checkpoint, teacher, chats):
    return [
        f"model.path={checkpoint}", f"teacher.path={teacher}", f"dataset.path={chats}", "max_seq_len=128", "device=cpu",
        "compute.dtype=fp32", "teacher.dtype=fp32", "global_batch_size=8", "micro_batch_size=4", "optimizer.lr=1e-3",
        "epochs=10", "checkpointer.every=null",
    ]  # fmt: skip


def run(folder, settings):
    distill.main(config.load("distill", [*settings, f"output_dir={folder}"]))
    return curve(folder)


def curve(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kl(p, q):
    return F.kl_div(q, p, reduction="sum", log_target=True)


def jensen_shannon(student, teacher):
    """Return the divergence as TRL 1.16 defines it for beta=0.25."""
    mixture = torch.logsumexp(torch.stack([student + torch.tensor(0.75).log(), teacher + torch.tensor(0.25).log()]), 0)
    return 0.25 * kl(teacher, mixture) + 0.75 * kl(student, mixture)


FORMULAS = {
    "forward": (["loss._component_=tune.losses.ForwardKL"], lambda s, t: kl(t, s), 1.0, 0.0),
    "reverse": (["loss._component_=tune.losses.ReverseKL", "loss.temperature=2"], kl, 2.0, 0.0),
    "mixed": (["loss.temperature=2", "loss.cross_entropy=0.3"], lambda s, t: kl(t, s), 2.0, 0.3),
    "Jensen-Shannon": (["loss._component_=tune.losses.JensenShannon", "loss.beta=0.25"], jensen_shannon, 1.0, 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["mixed"], FORMULAS))
def test_losses_match_a_transformers_loop(name, common, checkpoint, teacher, chats, tmp_path):
    settings, divergence, temperature, share = FORMULAS[name]
    ours = run(
        tmp_path, [*common, *settings, "max_steps=20", "schedule._component_=tune.optimizers.constant",
                   "schedule.warmup=0"],
    )  # fmt: skip
    student, fixed = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (checkpoint, teacher)
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    expected = []
    data = load(Tokenizer(str(checkpoint)), str(chats), max_seq_len=128)
    for _, batch in zip(range(20), DataLoader(data, Alone(), 8, 8, epochs=10, seed=0), strict=False):
        total = 0.0
        for sample in (data.row(row)[0] for row in batch[1].rows):
            labels = torch.from_numpy(sample.labels).long()
            learned = labels != -100
            tokens = torch.from_numpy(sample.tokens)[None].long()
            with torch.no_grad():
                target = (fixed(tokens).logits[0, learned] / temperature).log_softmax(-1)
            logits = student(tokens).logits[0, learned]
            loss = divergence((logits / temperature).log_softmax(-1), target)
            if share:
                cross_entropy = F.cross_entropy(logits, labels[learned], reduction="sum")
                loss = (1 - share) * temperature**2 * loss + share * cross_entropy
            loss = loss / batch[1].num_supervised
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    assert len(ours) == 20 and ours[-1] < 0.8 * ours[0]
    assert ours == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_bf16_teacher_is_close_to_fp32(common, tmp_path):
    """bf16 is the default; the student keeps its own dtype."""
    exact, rounded = (
        run(tmp_path / dtype, [*common, f"teacher.dtype={dtype}", "max_steps=3"]) for dtype in ("fp32", "bf16")
    )
    assert rounded == pytest.approx(exact, rel=1e-3) and rounded[0] != exact[0]


class Alone:
    data_rank, data_size, device = 0, 1, torch.device("cpu")


WAYS = {
    "plainly": [],
    "micro-batches of 1": ["micro_batch_size=1"],
    "micro-batches of 2": ["micro_batch_size=2"],
    "packed": ["packed=true"],
    "chunks": ["loss.chunk_tokens=5"],
    "recomputed": ["compute.activation_checkpointing=full"],
    "on the host": ["compute.cpu_offload=true"],
    "reduced once": ["parallel.reduce_every_micro_batch=false", "micro_batch_size=2"],
}
METHODS = {
    "forward": [],
    "reverse": ["loss._component_=tune.losses.ReverseKL"],
    "Jensen-Shannon": ["loss._component_=tune.losses.JensenShannon"],
    "mixed": ["loss.cross_entropy=0.5", "loss.temperature=3"],
    "adapter": ["adapter.rank=4"],
    "adapter on NF4": ["adapter.rank=4", "model.quantization=nf4"],
    "NF4 teacher": ["teacher.quantization=nf4"],
    "top 20": ["teacher.top_k=20", "loss.temperature=2"],
}


@pytest.fixture(scope="module")
def reference_curves(common, tmp_path_factory):
    """Curves of one process, by method."""
    folder = tmp_path_factory.mktemp("plainly")
    steps = f"max_steps={curve_steps()}"
    return {name: run(folder / name, [*common, *settings, steps]) for name, settings in METHODS.items()}


@pytest.mark.weekly
@pytest.mark.parametrize("way", weekly_but([*WAYS][1:2], [*WAYS][1:]))
def test_one_curve_in_one_process(way, common, reference_curves, tmp_path):
    settings = [*common, *WAYS[way], f"max_steps={curve_steps()}"]
    if way == "packed":  # packing changes rows and their order
        settings += ["global_batch_size=2", "micro_batch_size=2"]
        packed = run(tmp_path / "packed", settings)
        assert packed == pytest.approx(run(tmp_path / "again", [*settings, "micro_batch_size=1"]), rel=1e-5)
        return
    assert run(tmp_path, settings) == pytest.approx(reference_curves["forward"], rel=1e-5)


@pytest.mark.weekly
def test_one_curve_in_two_processes(common, reference_curves, tmp_path):
    layouts = {"HSDP": "parallel.dp_replicate=2", "heads shared": "parallel.tp=2", "tokens shared": "parallel.cp=2"}
    variants = {name: METHODS[name] for name in ("forward", "adapter on NF4", "NF4 teacher")}
    variants |= {f"top 20, {way}": [*METHODS["top 20"], layout] for way, layout in layouts.items()}
    settings = [*common, f"max_steps={curve_steps()}"]
    run_processes(RUN_VARIANTS, 2, "distill", str(tmp_path), json.dumps(settings), json.dumps(variants))
    for name in variants:
        assert curve(tmp_path / name) == pytest.approx(reference_curves[name.partition(", ")[0]], rel=1e-5), name


@pytest.mark.slow
def test_methods_differ(reference_curves):
    assert len({curve[0] for curve in reference_curves.values()}) == len(METHODS) - 1  # a fresh adapter changes nothing
    assert reference_curves["adapter"][0] == pytest.approx(reference_curves["forward"][0], rel=1e-6)
    assert all(curve[-1] < curve[0] for curve in reference_curves.values())


def assert_bitwise_resume(settings, exported, folder):
    """Assert that a run stopped in its second step resumes bitwise."""
    settings = [*settings, f"max_steps={curve_steps()}", "checkpointer.every=1", "checkpointer.keep=null"]
    whole = run(folder / "whole", settings)
    stopped = shutil.copytree(folder / "whole", folder / "stopped")
    for step in range(2, curve_steps() + 1):
        shutil.rmtree(stopped / "checkpoints" / f"step-{step:08d}")
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:2]))
    assert run(stopped, settings) == whole
    assert (stopped / exported).read_bytes() == (folder / "whole" / exported).read_bytes()


@pytest.mark.slow
def test_resume_is_bitwise_exact(common, tmp_path):
    assert_bitwise_resume([*common, *METHODS["mixed"]], "model/model.safetensors", tmp_path)


@pytest.mark.slow
def test_adapter_resume_is_bitwise_exact(common, tmp_path):
    assert_bitwise_resume([*common, *METHODS["adapter"]], "adapter/adapter_model.safetensors", tmp_path)


def test_student_as_its_own_teacher_has_zero_loss(common, checkpoint, chats, tmp_path):
    settings = [*common, f"teacher.path={checkpoint}", f"dataset.validation={chats}", "max_steps=1"]
    (loss,) = run(tmp_path, settings)
    (metrics,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert loss == pytest.approx(0, abs=1e-6) and 0 < metrics["validation_loss"] < 1e-2


@pytest.mark.slow
def test_padded_teacher_vocabulary_changes_nothing(common, teacher, tmp_path):
    """The embedding gets extra rows, as some members of a family have."""
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher)
    before = len(model.get_input_embeddings().weight)
    model.resize_token_embeddings(before + 24)
    torch.nn.init.normal_(model.get_input_embeddings().weight.data[before:])
    shutil.copytree(teacher, tmp_path / "padded")
    model.save_pretrained(tmp_path / "padded")
    first, second = (
        run(tmp_path / str(number), [*common, "max_steps=2", f"teacher.path={folder}"])
        for number, folder in enumerate((teacher, tmp_path / "padded"))
    )
    assert second == pytest.approx(first, rel=1e-6)


def test_teacher_with_too_few_embedding_rows_is_refused(common, tmp_path):
    small = save_checkpoint(tmp_path / "small", vocab_size=260)
    with pytest.raises(TuneError, match=r"the tokenizer produced token .*, but the model's vocab_size is 260"):
        run(tmp_path / "run", [*common, f"teacher.path={small}"])


def test_teacher_with_another_tokenizer_is_refused(common, teacher, tmp_path):
    other = shutil.copytree(teacher, tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = (next(token for token, index in vocabulary.items() if index == at) for at in (100, 101))
    vocabulary[one], vocabulary[two] = 101, 100
    file.write_text(json.dumps(content))
    with pytest.raises(TuneError, match=r"teacher.path: .*other has a different tokenizer from .*: 2 ids .* 100 \('"):
        run(tmp_path / "run", [*common, f"teacher.path={other}"])


@pytest.mark.parametrize(*REFUSED_BY)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["teacher.path=nowhere"], "nowhere"),
        (["teacher.path=null"], "teacher.path: null is not a string"),
        (["loss._component_=tune.losses.LinearCrossEntropy"], "takes other arguments than tune.losses.ForwardKL"),
        (["loss._component_=tune.losses.DPO"], "tune.losses.DPO compares log-probs of answers, unlike this recipe's"),
        (["on_policy.share=2"], "on_policy.share: 2 is not a number from 0 to 1"),
        (
            ["on_policy.share=1", "on_policy.max_new_tokens=999"],
            "on_policy: prompt of a token has",
        ),
        (["teacher.top_k=9999"], "teacher.top_k: 9999 exceeds the 300 tokens of the vocabulary"),
        (["teacher.top_k=8", "dataset.streaming=true", "epochs=1", "max_steps=2"], "teacher: the rows of"),
        (["teacher.dtype=fp64"], "teacher.dtype"),
        (["teacher.quantization=int8"], "teacher.quantization"),
        (["teacher.top_k=0"], "teacher.top_k"),
        (["teacher.top_k=8", "on_policy.share=0.5"], "teacher.top_k: the teacher cannot store predictions"),
        (["loss.temperature=0"], "loss.temperature"),
        (["loss.cross_entropy=1.5"], "loss.cross_entropy"),
        (["loss._component_=tune.losses.JensenShannon", "loss.beta=1"], "loss.beta"),
        (["loss.beta=0.5"], "loss.beta"),
        (
            ["loss._component_=tune.losses.Divergence"],
            "loss._component_: tune.losses.Divergence is an abstract class. Use one of ForwardKL, Jensen",
        ),
        (["model.quantization=nf4"], "model.quantization"),
    ],
)
def test_wrong_settings(settings, message, by, common, told, tmp_path, monkeypatch):
    if by == "validate":
        assert message in told("distill", [*common, *settings])
        return
    monkeypatch.delattr("tune.checkpointers.Pretrained.load")  # refused before weights are read
    with pytest.raises(TuneError, match=message):
        run(tmp_path, [*common, *settings])


ON_POLICY = ["on_policy.share=0.6", "on_policy.max_new_tokens=12", "loss._component_=tune.losses.ReverseKL"]


@pytest.mark.weekly
def test_on_policy_curve_is_the_same_in_every_layout(common, reference_curves, tmp_path):
    """Sampled tokens follow from the weights, which differ by rounding; only the first steps are sure to agree."""
    settings = [*common, *ON_POLICY, "max_steps=3"]
    whole = run(tmp_path / "whole", settings)
    assert all(
        one != pytest.approx(other, rel=1e-3) for one, other in zip(whole, reference_curves["reverse"], strict=False)
    )
    variants = {
        "micro 1": ["micro_batch_size=1"],
        "micro 2": ["micro_batch_size=2"],
        "HSDP": ["parallel.dp_replicate=2"],
    }
    assert run(tmp_path / "1", [*settings, "micro_batch_size=1"]) == pytest.approx(whole, rel=1e-5)
    run_processes(RUN_VARIANTS, 2, "distill", str(tmp_path), json.dumps(settings), json.dumps(variants))
    for name in variants:
        assert curve(tmp_path / name) == pytest.approx(whole, rel=1e-5), name


@pytest.mark.slow
def test_on_policy_loss_matches_computation_by_hand(common, checkpoint, teacher, chats, tmp_path):
    """Recompute the first step: the student's samples and the exact divergence at each sampled token."""
    (ours,) = run(tmp_path, [*common, *ON_POLICY, "on_policy.share=1", "max_steps=1"])
    tokenizer = Tokenizer(str(checkpoint))
    sampler = Sampler(max_new_tokens=12, stop_ids=tokenizer.stop_ids)
    data = load(tokenizer, str(chats), max_seq_len=128)
    ((_, batch),) = DataLoader(data, Alone(), 8, 8, max_steps=1, seed=0)
    student, fixed = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (checkpoint, teacher)
    )
    total, count = 0.0, 0
    for row in batch.rows:
        sample = data.row(row)[0]
        answer = int((sample.labels != -100).argmax())
        prompt = sample.tokens[: answer + 1].tolist()
        assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
        ((completion,),) = sampler(load_model(str(checkpoint)), [prompt], step=1, indices=[row])
        tokens = torch.tensor([prompt + completion.tokens])
        with torch.no_grad():
            p, q = (model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in (student, fixed))
        total, count = total + kl(p, q).item(), count + len(completion.tokens)
    assert ours == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
def test_prompts_without_room_for_an_answer_are_counted(common, tmp_path):
    short = save_checkpoint(tmp_path / "short", max_position_embeddings=80)
    run(tmp_path, [*common, f"model.path={short}", *ON_POLICY, "on_policy.max_new_tokens=40", "max_steps=2"])
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < step["without_room"] < 8 for step in steps)


@pytest.mark.slow
def test_on_policy_resume_is_bitwise_exact(common, tmp_path):
    assert_bitwise_resume([*common, *ON_POLICY], "model/model.safetensors", tmp_path)


@pytest.mark.slow
def test_storing_the_whole_distribution_changes_nothing(common, reference_curves, chats, tmp_path):
    validated = [f"dataset.validation={chats}", f"dataset.cache_dir={tmp_path / 'kept'}"]
    settings = [*common, *validated, "teacher.top_k=300", f"max_steps={curve_steps()}"]
    assert run(tmp_path / "stored", settings) == pytest.approx(reference_curves["forward"], rel=1e-5)
    last = json.loads((tmp_path / "stored" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < last["validation_loss"] < reference_curves["forward"][0]
    assert len(list((tmp_path / "kept").glob("teacher-*.npy"))) == 1  # training and validation share their rows


@pytest.mark.weekly
def test_stored_predictions_are_reused(common, reference_curves, tmp_path):
    """Reuse requires the same teacher, rows and temperature."""
    kept_in = f"dataset.cache_dir={tmp_path / 'kept'}"
    settings = [*common, *METHODS["top 20"], kept_in]
    assert_bitwise_resume(settings, "model/model.safetensors", tmp_path)
    assert curve(tmp_path / "whole") == reference_curves["top 20"]
    (file,) = (tmp_path / "kept").glob("teacher-*.npy")
    kept = np.load(file)
    assert kept.shape[1] == 41 and kept[:, 20:].max() <= 1e-6
    run(tmp_path / "stopped", [*settings, "loss.temperature=3", f"max_steps={curve_steps() + 1}"])
    assert len(list((tmp_path / "kept").glob("teacher-*.npy"))) == 2


@pytest.mark.slow
def test_teacher_is_freed_once_its_predictions_are_stored(common, frozen_in_steps, tmp_path):
    run(tmp_path, [*common, f"dataset.cache_dir={tmp_path / 'kept'}", "teacher.top_k=8", "max_steps=1"])
    assert frozen_in_steps == [False]


@pytest.mark.slow
def test_prepare_stores_predictions_for_the_run(common, reference_curves, chats, tmp_path, capsys):
    """The run does not compute them again."""
    more = [f"dataset.validation={chats}", "dataset.take=20", f"dataset.cache_dir={tmp_path / 'kept'}"]
    settings = [*common, *METHODS["top 20"], *more, "max_steps=1"]
    tune(["prepare", "distill", *settings])
    assert "the teacher's 20 most probable tokens are stored" in capsys.readouterr().out
    stored = {file: file.stat().st_mtime_ns for file in (tmp_path / "kept").glob("teacher-*.npy")}
    run(tmp_path / "run", settings)
    assert len(stored) == 2
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "kept").glob("teacher-*.npy")} == stored


@pytest.mark.weekly
def test_student_answers_to_fixed_prompts(common, checkpoint, tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat\nit was\n")
    asked = [f"evaluate.prompts={tmp_path}/prompts.txt", "evaluate.max_new_tokens=7", "evaluate.every=2"]
    with_answers = run(tmp_path / "asked", [*common, *asked, "max_steps=3"])
    assert with_answers == run(tmp_path / "plain", [*common, "max_steps=3"])
    rows = [json.loads(line) for line in (tmp_path / "asked" / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["index"]) for row in rows] == [(at, index) for at in (0, 2, 3) for index in range(2)]
    tokenizer = Tokenizer(str(checkpoint))
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows[:2]]
    prompts = [tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True)) for chat in chats]
    sampler = Sampler(max_new_tokens=7, temperature=0, stop_ids=tokenizer.stop_ids)
    assert [row["tokens"] for row in rows[:2]] == [
        completion.tokens for (completion,) in sampler(load_model(str(checkpoint)), prompts)
    ]

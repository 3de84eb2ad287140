"""`tune verify`: transformers, PEFT, and llama.cpp compute from an artifact what the run computes, and planted errors
are found."""

import errno
import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lora_finetune
import pytest
import torch
from helpers import make_adapter, run_verbs, save_checkpoint, slow_but
from safetensors.torch import load_file, save_file

from tune.checkpointers import load_model
from tune.cli import main
from tune.models import build
from tune.tokenizers import Tokenizer
from tune.verify import LlamaCpp
from tune.verify.comparison import (
    Observed,
    RoundedInputs,
    _answers,
    _distances,
    _is_same_chat,
    _is_same_text,
    _miscounted,
    _of_program,
    _rounded,
)
from tune.verify.probes import Probe
from tune.verify.programs import Stored, Transformers, type_of

transformers = pytest.importorskip("transformers")
COMPUTED = {"greedy answers", "log-probs", "perplexity", "adapter"}
READ = {"tokens", "chat template", "stop tokens", "config"}


@pytest.fixture(scope="module")
def run(checkpoint: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an adapter on a model with an extra stop token that does not end a turn in its template."""
    folder = tmp_path_factory.mktemp("verified")
    shutil.copytree(checkpoint, folder / "base")
    file = folder / "base" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 40]}))
    settings = [
        f"model.path={folder / 'base'}", f"dataset.path={chats}", f"output_dir={folder / 'run'}", "device=cpu",
        "compute.dtype=fp32", "optimizer.lr=0.01", "global_batch_size=4", "max_seq_len=128", "max_steps=3",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["lora_finetune", *settings])
        lora_finetune.main()
    return folder / "run"


@pytest.fixture(scope="module")
def artifact(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes an artifact of the run by kind."""
    folder = tmp_path_factory.mktemp("artifacts")

    def made(kind: str) -> Path:
        out = folder / kind
        if kind == "adapter":
            return run / "adapter"
        if kind == "base":
            return run.parent / "base"
        if not out.exists() and kind == "merged":
            main(["export", str(run), "--to", "hf", "--out", str(out)])
        elif not out.exists() and kind.endswith(".gguf"):
            main(["export", str(run), "--to", "gguf", "--type", out.stem, "--out", str(out)])
        elif not out.exists():
            source, to = (run, kind) if "_of_" not in kind else (made("base"), kind.partition("_")[0])
            main(["quantize", str(source), "--to", to, "--out", str(out)])
        return out

    return made


def verified(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, str]]:
    """Return the exit code and the result of each check."""
    capsys.readouterr()
    code = 0
    try:
        main(["verify", *map(str, arguments), "--limit", "4", "--tokens", "40"])
    except SystemExit as end:
        code = int(end.code or 0)
    statuses = ("  same", "DIFFERENT", "not comparable")
    printed = capsys.readouterr()
    assert "it/s]" not in printed.err and "Warning" not in printed.err  # of libraries
    lines = [line for line in printed.out.splitlines() if line.endswith(statuses)]
    return code, {line.split("  ")[0]: line.rsplit("  ", 1)[1].strip() for line in lines}


def differing(checks: dict[str, str]) -> set[str]:
    return {name for name, result in checks.items() if result == "DIFFERENT"}


KINDS = ("merged", "adapter", "f16.gguf", "int4", "q8_0.gguf", "q4_0.gguf", "int8", "fp8", "mxfp4", "nf4")


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but({"f16.gguf"}, KINDS))
def test_correct_artifacts_pass(kind: str, run: Path, artifact: Callable, capsys: pytest.CaptureFixture) -> None:
    for package in {"adapter": ["peft"], "nf4": ["bitsandbytes"]}.get(kind, ["xllamacpp", "compressed_tensors"]):
        pytest.importorskip(package)
    code, checks = verified(capsys, artifact(kind), "--against", run)
    of_folder = {"adapter": {"generation"}}.get(kind, {"generation", "weights"})
    assert set(checks) == READ | COMPUTED | (set() if kind.endswith("gguf") else of_folder)
    assert (code, differing(checks)) == (0, set())
    assert set(checks.values()) == {"same"}


def change_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def wrong_rope(folder: Path) -> None:
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    change_json(folder / "config.json", rope_parameters=scaled)


def missing_stop(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=2)


def other_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("user\n", "user").replace("'\\n'", "''").replace("\n", " "))


def swapped_tokens(folder: Path) -> None:
    """Swap the ids of two special tokens: chats keep their lengths, but not their tokens."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    one, other = "<|im_start|>", "<|im_end|>"
    vocab = tokenizer["model"]["vocab"]
    if one in vocab:
        vocab[one], vocab[other] = vocab[other], vocab[one]
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    added[one]["id"], added[other]["id"] = added[other]["id"], added[one]["id"]
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    file.write_text(json.dumps(tokenizer))


def extra_stop(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=[2, 40, 41])


def no_decoder(folder: Path) -> None:
    change_json(folder / "tokenizer.json", decoder=None)


def sampling(folder: Path) -> None:
    change_json(folder / "generation_config.json", do_sample=True, temperature=5.0)


def short_answers(folder: Path) -> None:
    change_json(folder / "generation_config.json", max_new_tokens=64)


def suppressed(folder: Path) -> None:
    """Suppress a token that no greedy answer has."""
    change_json(folder / "generation_config.json", suppress_tokens=[43])


def template_if(condition: str, folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(f"{{% if {condition} %}}broken{{% endif %}}{file.read_text()}")


def short_context(folder: Path) -> None:
    change_json(folder / "config.json", max_position_embeddings=32)


def dynamic_rope(folder: Path) -> None:
    """Only texts longer than the context differ."""
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    change_json(folder / "config.json", rope_parameters=scaled)


def all_settings(folder: Path) -> None:
    extra_stop(folder)
    no_decoder(folder)
    sampling(folder)
    template_if("tools", folder)
    short_context(folder)


def same_settings(folder: Path) -> None:
    """Spell settings as other libraries do, and change those that do not change answers."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters", None) or {"rope_theta": config.pop("rope_theta", 10000.0)}
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    changes = {"transformers_version": "4.0.0", "pad_token_id": 5, "use_cache": False}
    defaults = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.0}
    change_json(folder / "generation_config.json", **changes, **defaults)


def wrong_scale(folder: Path) -> None:
    """Change the scale of one layer."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("0.mlp.down_proj.weight_scale"))
    tensors[name] *= 3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def not_a_number(folder: Path) -> None:
    """Break the embedding of one token, so that all later tokens of its texts are NaN."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][1] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def lost_norm(folder: Path) -> None:
    """Lose a tensor; transformers initializes it."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_gguf(file: Path, key: str, factor: float) -> None:
    gguf = pytest.importorskip("gguf")
    field = gguf.GGUFReader(file, "r+").fields[key]
    field.parts[field.data[0]][0] *= factor


def wrong_frequency(file: Path) -> None:
    change_gguf(file, "llama.rope.freq_base", 8)


def wrong_norm(file: Path) -> None:
    """Change the results less than rounding to 8 bits does."""
    change_gguf(file, "llama.attention.layer_norm_rms_epsilon", 2)


def other_name(file: Path) -> None:
    """Misspell the assistant role in the template, with the same length."""
    content = file.read_bytes()
    assert content.count(b"<|im_start|>assistant\n{% endif %}") == 1
    file.write_bytes(content.replace(b"<|im_start|>assistant\n{% endif %}", b"<|im_start|>assistent\n{% endif %}"))


def wrong_blocks(file: Path) -> None:
    """Change the scales of one tensor: each block has an fp16 scale before 32 one-byte codes."""
    gguf = pytest.importorskip("gguf")
    data = next(tensor.data for tensor in gguf.GGUFReader(file, "r+").tensors if tensor.name == "blk.0.ffn_down.weight")
    blocks = data.reshape(-1, 34)
    blocks[:, :2] = torch.from_numpy(blocks[:, :2].copy()).view(torch.float16).mul(3).view(torch.uint8).numpy()


PLANTED = {
    "a rope scale": ("merged", wrong_rope, {"log-probs"}),
    "a stop token": ("merged", missing_stop, {"stop tokens"}),
    "a chat template": ("merged", other_template, {"chat template"}),
    "two special tokens": ("merged", swapped_tokens, {"chat template"}),
    "all settings": ("merged", all_settings, {*READ, "generation"}),
    "another stop token": ("merged", extra_stop, {"stop tokens"}),
    "a decoder": ("merged", no_decoder, {"tokens"}),
    "sampling": ("merged", sampling, {"generation"}),
    "the length of answers": ("merged", short_answers, {"generation"}),
    "a suppressed token": ("merged", suppressed, {"generation"}),
    "a template with tools": ("merged", partial(template_if, "tools"), {"chat template"}),
    "a template of tool results": (
        "merged", partial(template_if, "messages | selectattr('role', 'eq', 'tool') | list"), {"chat template"},
    ),
    "a template of long chats": ("merged", partial(template_if, "messages | length > 4"), {"chat template"}),
    "the context": ("merged", short_context, {"config"}),
    "rope scaling of long texts": ("merged", dynamic_rope, {"config"}),
    "NaN": ("merged", not_a_number, {"log-probs", "perplexity", "adapter"}),
    "a lost tensor": ("merged", lost_norm, {"weights"}),
    "a norm in GGUF": ("q8_0.gguf", wrong_norm, {"config"}),
    "an unmerged adapter": ("base", None, COMPUTED),
    "an unmerged adapter, in 4 bits": ("int4_of_base", None, {"adapter"}),
    "a scale of quantization": ("int8", wrong_scale, {"log-probs"}),
    "a scale in 4 bits": ("int4", wrong_scale, {"log-probs"}),
    "a rope base in GGUF": ("f16.gguf", wrong_frequency, {"log-probs"}),
    "a chat template in GGUF": ("f16.gguf", other_name, {"chat template"}),
    "a scale in GGUF": ("q8_0.gguf", wrong_blocks, {"log-probs"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but({"a rope scale", "two special tokens", "all settings"}, PLANTED))
def test_planted_errors_are_found(
    name: str, run: Path, artifact: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    kind, change, expected = PLANTED[name]
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("xllamacpp")
    source, spoilt = artifact(kind), tmp_path / kind
    shutil.copy(source, spoilt) if source.is_file() else shutil.copytree(source, spoilt)
    if change:
        change(spoilt)
    code, checks = verified(capsys, spoilt, "--against", run)
    assert code == 1 and expected <= differing(checks)


NONE: list[float | None] = [None] * 8
DISTANCES = {
    "the same": ([-1.0] * 8, True, "8 tokens"),
    "within the tolerance": ([-1.05] * 8, True, "8 tokens"),
    "NaN": ([-1.0, *[math.nan] * 7], False, "8 tokens"),
    "infinite": ([-1.0] * 7 + [-math.inf], False, "8 tokens"),
    "one value too few": ([-1.0] * 7, False, "0 tokens"),
    "one value too many": ([-1.0] * 9, False, "0 tokens"),
    "some not reported": ([-1.0] * 5 + NONE[:3], True, "5 tokens"),
    "some not reported, others NaN": ([math.nan, *[-1.0] * 4, *NONE[:3]], False, "5 tokens"),
    "most not reported": ([-1.0, *NONE[:7]], None, "1 tokens"),
    "none reported": (NONE, None, "0 tokens"),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_values_that_are_broken_are_not_values_that_are_missing(name: str) -> None:
    values, expected, count = DISTANCES[name]
    found = Observed([], [], {}, set(), [], 2, [values])
    probes = [Probe([*range(9)], [0], "a text")]
    checks = _distances(_of_program(found, probes), torch.full((8,), -1.0).double(), 0.1, _miscounted(found, probes))
    assert (checks[0].is_same, checks[0].artifact) == (expected, count)
    assert expected is not True or checks[1].is_same
    assert expected is True or checks[0].detail


def test_run_whose_own_model_is_broken_is_not_comparable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    checks = _distances([-1.0] * 8, torch.full((8,), math.nan).double(), math.nan, "")
    assert [check.is_same for check in checks] == [None, None]
    monkeypatch.setattr("tune.cli.verify.verify", lambda options: checks)
    code, results = verified(capsys, "a", "--against", "b")
    assert code == 2 and results == dict.fromkeys(("log-probs", "perplexity"), "not comparable")


@pytest.mark.slow
def test_texts_that_are_not_compared_whole_are_counted(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "texts.txt").write_text("the cat\n" + "the cat sat on the mat " * 20 + "\n")
    main(["verify", str(checkpoint), "--against", str(checkpoint), "--prompts", str(tmp_path / "texts.txt")])
    assert "1 of 2" in capsys.readouterr().err


def test_values_that_llama_cpp_reports_as_null_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    program = object.__new__(LlamaCpp)
    answers = iter([[{"id": 5, "logprob": -1.0}], [{"id": 6, "logprob": None}], []])
    monkeypatch.setattr(LlamaCpp, "complete", lambda *_, **__: next(answers))
    first, second, third = program.log_probs([4, 5, 6, 7])
    assert (first, third) == (-1.0, None) and second is not None and math.isnan(second)


@pytest.mark.slow
def test_settings_of_the_same_meaning_pass(
    run: Path, artifact: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    same = shutil.copytree(artifact("merged"), tmp_path / "same")
    same_settings(same)
    assert verified(capsys, same, "--against", run)[0] == 0


@pytest.mark.slow
def test_notes_of_an_export_are_repeated(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("xllamacpp")
    base, file = shutil.copytree(checkpoint, tmp_path / "base"), tmp_path / "yarn.gguf"
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": False}
    change_json(base / "config.json", rope_parameters={"rope_theta": 10000.0, **yarn})
    main(["export", str(base), "--to", "gguf", "--out", str(file)])
    (note,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ") and "YaRN" in line)
    with suppress(SystemExit):
        main(["verify", str(file), "--against", str(base), "--limit", "1", "--tokens", "8"])
    assert note in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_rounding_of_the_yardstick_is_that_of_q8_0(
    artifact: Callable, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its error is that of gguf's own rounding; a scale for each row has a larger one if weights differ in size."""
    gguf = pytest.importorskip("gguf")
    main(["export", str(checkpoint), "--to", "gguf", "--type", "q8_0", "--out", str(tmp_path / "q8_0.gguf")])
    stored = type_of(tmp_path / "q8_0.gguf", checkpoint)
    assert stored == Stored(8, 32, 32)
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    weight[:, 0] = 50
    kind = gguf.GGMLQuantizationType.Q8_0
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    ours, by_row = _rounded(weight, 8, stored.group), _rounded(weight, 8, None)
    error, of_rows, of_gguf = ((found - weight).abs().mean() for found in (ours, by_row, theirs))
    assert abs(error / of_gguf - 1) < 0.1 and of_rows > 3 * of_gguf


def test_inputs_of_products_are_rounded_but_not_attention(checkpoint: Path) -> None:
    """The rounded model is the model with rounding before each of its linear layers and its head."""
    torch.manual_seed(0)
    model = build(str(checkpoint)).to_empty(device="cpu").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        with RoundedInputs(32):
            rounded = model(tokens)
        plain = model(tokens)
        hooks = [
            linear.register_forward_pre_hook(lambda _, inputs: (_rounded(inputs[0], 8, 32),)) for linear in linears
        ]
        model.norm.register_forward_hook(lambda *called: _rounded(called[-1], 8, 32))  # the head is not called
        expected = model(tokens)
    assert len(hooks) > 10 and not torch.allclose(plain, expected, atol=1e-4)
    assert torch.allclose(rounded, expected, atol=1e-6)


def test_a_full_disk_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Other texts are not used instead, and the exit code is not that of a difference."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tune.datasets.preparation.keep", full)
    code, _ = verified(capsys, run / "adapter", "--against", run)
    assert code == 2
    monkeypatch.setattr("tune.cli.verify.verify", full)
    assert verified(capsys, run / "adapter", "--against", run)[0] == 2
    monkeypatch.setattr("tune.cli.verify.verify", lambda options: 1 / 0)
    assert verified(capsys, run / "adapter", "--against", run)[0] == 2


@pytest.mark.slow
def test_verify_one_model_against_another_with_texts_from_a_file(
    run: Path, artifact: Callable, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its folder does not name data and has no adapter."""
    (tmp_path / "texts.txt").write_text("the cat sat\nand it ran under the mat\n")
    asked = ["--prompts", tmp_path / "texts.txt"]
    code, checks = verified(capsys, checkpoint, "--against", checkpoint, *asked)
    assert code == 0 and set(checks) == {*READ, "generation", "weights", *COMPUTED} - {"adapter"}
    code, checks = verified(capsys, artifact("merged"), "--against", checkpoint)
    assert code == 1 and {"greedy answers", "log-probs"} <= differing(checks)
    loose = ["--tolerance", "9"]
    checks = verified(capsys, artifact("merged"), "--against", checkpoint, *loose)[1]
    assert differing(checks) == {"stop tokens"}  # the run has one more than the checkpoint


@pytest.mark.slow
def test_stop_tokens_beyond_the_limit_of_gguf(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """GGUF has room for three."""
    pytest.importorskip("xllamacpp")
    for ends, code in (([2, 40, 41], 0), ([2, 40, 41, 42], 1)):
        folder, file = tmp_path / f"{len(ends)}", tmp_path / f"{len(ends)}.gguf"
        shutil.copytree(checkpoint, folder)
        change_json(folder / "generation_config.json", eos_token_id=ends)
        main(["export", str(folder), "--to", "gguf", "--out", str(file)])
        assert ("will not stop at H" in capsys.readouterr().out) == bool(code)
        exit_code, checks = verified(capsys, file, "--against", folder)
        assert exit_code == code and differing(checks) == ({"stop tokens"} if code else set())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_verify_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A model, its adapter, and the model without its stop token, each in its own process: vLLM does not clean up."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    base = save_checkpoint(tmp_path / "base", head_dim=32)
    adapter = make_adapter(base, tmp_path / "adapter", 1)
    spoilt = shutil.copytree(base, tmp_path / "spoilt")
    for name in ("config.json", "generation_config.json"):
        change_json(spoilt / name, eos_token_id=0)
    change_json(spoilt / "tokenizer_config.json", eos_token="<|endoftext|>")
    named = [(base, base), (adapter, adapter), (spoilt, base)]
    lines = [["verify", str(path), "--against", str(run), "--with", "vllm", "--limit", "3"] for path, run in named]
    codes = []
    for line in lines:
        (done,) = run_verbs(line)
        assert "greedy answers" in done.stdout, done.stderr
        codes.append((done.returncode, "stop tokens: " in done.stdout))
    assert codes == [(0, False), (0, False), (1, True)]


WRONG = {
    "nothing there": (["nothing", "--against", "RUN"], "nothing: "),
    "no GGUF": (["junk.gguf", "--against", "RUN"], "junk.gguf is "),
    "no model": (["empty", "--against", "RUN"], "empty has no config.json"),
    "the run itself": (["RUN", "--against", "RUN"], "is a run, not its result"),
    "a broken adapter": (["broken", "--against", "RUN"], "adapter_config.json: r: '4'"),
    "no base": (["homeless", "--against", "RUN"], "adapter_config.json: base_model_name_or_path is '/gone'"),
    "another program": (
        ["RUN/adapter", "--against", "RUN", "--with", "llama.cpp"],
        "can only be opened with peft or vllm",
    ),
    "no run": (["RUN/adapter", "--against", "nothing"], "nothing does not exist"),
    "no step": (["RUN/adapter", "--against", "RUN", "--step", "99"], "no checkpoint of step 99; it has 3"),
    "no prompts": (["RUN/adapter", "--against", "RUN", "--prompts", "none.txt"], "none.txt: there is no such file"),
    "short texts": (["RUN/adapter", "--against", "RUN", "--tokens", "1"], "--tokens 1: "),
    "tolerance": (["RUN/adapter", "--against", "RUN", "--tolerance", "-1"], "--tolerance -1.0: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_inputs_are_rejected(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "junk.gguf").write_text("hello")
    (tmp_path / "empty").mkdir()
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    for folder, changes in {"broken": {"r": "4"}, "homeless": {"base_model_name_or_path": "/gone"}}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(fields | changes))
    arguments, message = WRONG[name]
    with pytest.raises(SystemExit) as ended:
        main(["verify", *(argument.replace("RUN", str(run)) for argument in arguments)])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "own", "is_same"),
    [
        (" the cat", "the cat", True),
        ("the cut", "the cat", False),
        ("a \u65e5\ufffd", "a \ufffd\ufffd\ufffd\ufffd", True),  # llama.cpp keeps the whole characters of cut bytes
        ("b \u65e5\ufffd", "a \ufffd\ufffd\ufffd\ufffd", False),
    ],
)
def test_texts_are_compared_up_to_bytes_that_are_no_character(theirs: str, own: str, is_same: bool) -> None:
    assert _is_same_text(theirs, own) == is_same


def test_spaces_that_llama_cpp_adds_around_special_tokens(checkpoint: Path) -> None:
    tokenizer = Tokenizer(str(checkpoint))
    expected = "<|im_start|>user\nHello!<|im_end|>\n"
    spaced = " <|im_start|> user\nHello! <|im_end|> \n"
    assert _is_same_chat((spaced, 9), expected, tokenizer, "<s>")
    assert not _is_same_chat((spaced.replace("Hello", "Hel lo"), 9), expected, tokenizer, "<s>")
    assert not _is_same_chat((spaced, [1, 2]), expected, tokenizer, "<s>")  # other programs report their own text


@pytest.mark.slow
def test_folder_of_a_model_that_reads_images(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 400, "head_dim": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **sizes}, vision_config={"model_type": "pixtral", **vision}
    )
    save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    program = Transformers(tmp_path, torch.device("cpu"), "fp32")
    assert len(program.log_probs([5, 6, 7])) == 2
    assert type(program.model) is transformers.Mistral3ForConditionalGeneration and not program.missing


def gemma3(folder: Path, **changes: Any) -> Path:
    """Save a model that reads images, of which the class for text alone lacks the tower."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"num_key_value_heads": 1, "vocab_size": 400, "head_dim": 16}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    changes |= {"mm_tokens_per_image": 4, "eos_token_id": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **changes)
    save_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_lost_image_tower_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    whole = gemma3(tmp_path / "whole")
    assert verified(capsys, whole, "--against", whole)[0] == 0
    without = shutil.copytree(whole, tmp_path / "without")
    tensors = load_file(without / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if "vision" not in name}
    assert len(text) < len(tensors)
    save_file(text, without / "model.safetensors", {"format": "pt"})
    code, checks = verified(capsys, without, "--against", whole)
    assert code == 1 and differing(checks) == {"weights"}


@pytest.mark.slow
@pytest.mark.parametrize("outer", [False, True])
def test_class_that_the_config_names_decides_whether_weights_are_tied(
    outer: bool, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = gemma3(tmp_path / "whole", tie_word_embeddings=outer)
    change_json(whole / "config.json", tie_word_embeddings=outer)
    config = json.loads((whole / "config.json").read_text())
    change_json(whole / "config.json", text_config=config["text_config"] | {"tie_word_embeddings": not outer})
    code, checks = verified(capsys, whole, "--against", whole)
    assert (code, differing(checks)) == (0, set())


@pytest.mark.slow
def test_texts_in_turn_through_sliding_windows_in_llama_cpp(tmp_path: Path) -> None:
    """Each text reads its own keys and values, not those that an earlier text left in the cache of the windows."""
    pytest.importorskip("xllamacpp")
    sizes = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, "num_hidden_layers": 2}
    folder, file = save_checkpoint(tmp_path / "m", "Gemma3TextConfig", **sizes), tmp_path / "m.gguf"
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: 4 * each if each.ndim > 1 else each for name, each in weights.items()}, folder / "model.safetensors"
    )
    main(["export", str(folder), "--to", "gguf", "--out", str(file)])
    model = load_model(folder)
    texts = [[*range(start, start + 24)] for start in (20, 60)]
    with LlamaCpp(file) as program:
        for ids in texts:
            log_probs = model(torch.tensor([ids]))[0].log_softmax(-1)
            own = log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            assert program.log_probs(ids) == pytest.approx(own, abs=0.02)


def test_accepted_answers_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = Observed([], [], {}, set(), [[5, 6], [7, 8]], 2, [])
    tokenizer: Any = SimpleNamespace(stop_ids={2}, decode=str)

    def printed(loss: float) -> str:
        losses = [torch.zeros(2), torch.tensor([0.0, loss])]
        check = _answers(found, losses, tokenizer, tolerance=0.02)
        assert check.is_same
        monkeypatch.setattr("tune.cli.verify.verify", lambda options: [check])
        main(["verify", "a", "--against", "b"])
        return capsys.readouterr().out.partition("same\n")[2].rpartition("  same\n")[2]

    assert "1 of 2" in printed(0.04) and "0.0100 nats" in printed(0.04)
    assert printed(0.0) == ""


@pytest.mark.parametrize(
    ("answer", "is_same"), [([5, 6, 7], True), ([5, 2], True), ([5, 6], False), ([5, 2, 7], False)]
)
def test_answers_must_end_where_the_run_ends_them(answer: list[int], is_same: bool) -> None:
    """At a stop token, or at the longest length."""
    found = Observed([], [], {}, set(), [answer], 3, [])
    tokenizer: Any = SimpleNamespace(stop_ids={2}, decode=str)
    assert _answers(found, [torch.zeros(len(answer))], tokenizer, tolerance=0.02).is_same == is_same

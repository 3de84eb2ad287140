import full_finetune
import pytest

from tune import config
from tune.cli import main
from tune.cli.recipes import settings
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


@pytest.fixture
def arguments(checkpoint, chats, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNE_CACHE", str(tmp_path / "cache"))
    return [f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=128", "packed=true"]


@pytest.mark.slow
def test_run_uses_prepared_data(arguments, chats, tmp_path, monkeypatch, capsys):
    arguments.append(f"dataset.validation={chats}")
    main(["prepare", "full_finetune", *arguments])
    shown = capsys.readouterr().out
    assert shown.count("packed rows") == 2
    assert "warnings\n  48 of the 48 validation samples are also training samples" in shown
    assert not (tmp_path / "runs").exists()
    monkeypatch.delattr(Tokenizer, "encode_with_offsets")
    run = [*arguments, "max_steps=1", "device=cpu", "compute.dtype=fp32", f"output_dir={tmp_path / 'run'}"]
    full_finetune.main(config.load("full_finetune", run))
    assert (tmp_path / "run" / "model").exists()


def test_only_the_first_window_of_a_stream_is_prepared(arguments, tmp_path, capsys):
    main(["prepare", "full_finetune", *arguments, "dataset.streaming=true"])
    shown = capsys.readouterr().out
    assert "is streamed: only its first rows are cached" in shown and "no warnings" in shown
    assert [file.parent.name for file in (tmp_path / "cache").glob("*/*")] == ["windows"]


def test_prepare_needs_no_weights(arguments, checkpoint, tmp_path, capsys):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    main(["prepare", "lora_finetune", *arguments, f"model.path={tmp_path}"])
    assert capsys.readouterr().out.endswith("\nno warnings\n")


@pytest.mark.slow
def test_config_finds_its_recipe(arguments, tmp_path):
    (tmp_path / "mine.yaml").write_text("adapter: {rank: 4}\n")
    cfg = settings(str(tmp_path / "mine.yaml"), arguments)
    assert cfg.adapter.rank == 4
    (tmp_path / "mine.yaml").write_text("adapter: {rnk: 4}\n")
    with pytest.raises(TuneError, match=r"adapter\.rnk: .* Did you mean 'adapter\.rank'\?"):
        settings(str(tmp_path / "mine.yaml"), arguments)


def test_unknown_settings_are_rejected(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["prepare", "full_finetune", *arguments, "dataset.wrkers=2"])
    assert "dataset.wrkers: is not a setting. Did you mean 'dataset.workers'?" in capsys.readouterr().err
    (tmp_path / "script.py").write_text("print(1)\n")
    with pytest.raises(TuneError, match="does not name its settings"):
        settings(str(tmp_path / "script.py"), [])

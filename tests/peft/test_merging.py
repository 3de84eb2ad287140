"""Several adapters are merged into one like with PEFT's `add_weighted_adapter`."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import load_model
from tune.checkpointers.writing import HUB_ID
from tune.cli import main
from tune.peft import LoRA, add_adapters, export_adapter
from tune.tokenizers import Tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(80).view(2, 40)


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, paths = tmp_path_factory.mktemp("adapters"), {}
    for seed, (name, lora) in enumerate(
        {
            "a": LoRA(rank=4, alpha=8),
            "b": LoRA(rank=4, alpha=2, rank_stabilized=True),
            "c": LoRA(rank=4, alpha=16, alpha_pattern={"q_proj": 4}),
            "wide": LoRA(rank=8),
            "dora": LoRA(rank=4, dora=True),
            "few": LoRA(rank=4, target_modules=["q_proj"]),
        }.items()
    ):
        torch.manual_seed(seed)
        model = load_model(str(checkpoint))
        add_adapters(model, lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.05)
        world, tokenizer = distributed.init("cpu"), Tokenizer(str(checkpoint))
        export_adapter(model, folder / name, world=world, base=str(checkpoint), tokenizer=tokenizer)
        paths[name] = folder / name
    return paths


def test_model_card_names_the_base_by_its_hub_id(adapters: dict[str, Path], checkpoint: Path, tmp_path: Path) -> None:
    base = shutil.copytree(checkpoint, tmp_path / "base")
    (base / HUB_ID).parent.mkdir(parents=True)  # as `tune download` does
    (base / HUB_ID).write_text("someone/tiny")
    main(["merge", str(base), str(adapters["a"]), str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\nbase_model: someone/tiny\n" in card and "`someone/tiny` with the adapter" in card


@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear", "dare_ties"])
def test_merging_several_adapters_matches_peft(
    method: str, adapters: dict[str, Path], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, weights, density = ["a", "b", "c"], [0.7, 1.5, -0.4], 0.3
    options = ["--method", method, "--weights", *map(str, weights)]
    options += ["--density", str(density)] * (method != "linear") + ["--seed", "3"] * ("dare" in method)
    main(["merge", str(checkpoint), *(str(adapters[name]) for name in names), str(tmp_path / "out"), *options])
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval(), adapters["a"], adapter_name="a"
    )
    for name in names[1:]:
        theirs.load_adapter(adapters[name], adapter_name=name)
    # PEFT first draws the start of the new adapter from the same generator, so the seed is set after that.
    calls, real = [], peft.tuners.lora.LoraModel._generalized_task_arithmetic_weighted_adapter

    def seeded(*arguments: object, **named: object) -> object:
        if not calls:
            torch.manual_seed(3)
        calls.append(1)
        return real(*arguments, **named)

    monkeypatch.setattr(peft.tuners.lora.LoraModel, "_generalized_task_arithmetic_weighted_adapter", seeded)
    theirs.add_weighted_adapter(names, weights, "all", combination_type=method, density=density)
    theirs.set_adapter("all")
    with torch.no_grad():
        base, expected = load_model(str(checkpoint))(TOKENS), theirs(TOKENS).logits
        logits = load_model(str(tmp_path / "out"))(TOKENS)
    assert (expected - base).abs().max() > 0.05
    assert_close(logits, expected, atol=1e-5, rtol=1e-5)


WRONG = {
    "no method": (["a", "b"], "several adapters need --method"),
    "a method of one": (["a", "--method", "ties"], "one adapter takes no --method"),
    "weights of one": (["a", "--weights", "1"], "one adapter takes no --method"),
    "unknown method": (["a", "b", "--method", "slerp"], "invalid choice: 'slerp'"),
    "too few weights": (["a", "b", "--method", "linear", "--weights", "1"], "1 weights for 2 adapters"),
    "a weight that is none": (["a", "b", "--method", "linear", "--weights", "x", "1"], "invalid float value: 'x'"),
    "a weight that is not finite": (
        ["a", "b", "--method", "ties", "--weights", "nan", "1"],
        "the weights nan, 1.0 are not all",
    ),
    "density of linear": (["a", "b", "--method", "linear", "--density", "0.3"], "--density is for ties and dare"),
    "seed of ties": (["a", "b", "--method", "ties", "--seed", "3"], "--seed for dare (got --method ties)"),
    "density": (["a", "b", "--method", "ties", "--density", "1.5"], "density 1.5 is out of range"),
    "another rank": (["a", "wide", "--method", "linear"], "is for another model"),
    "other layers": (["a", "few", "--method", "linear"], "is for another model"),
    "DoRA": (["a", "dora", "--method", "linear"], "more than LoRA matrices of linear layers"),
    "no adapter": (["a", "absent", "--method", "linear"], "adapter_config.json"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_inputs_are_refused(
    wrong: str, adapters: dict[str, Path], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = WRONG[wrong]
    split = next((at for at, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    folders = [str(adapters.get(name, tmp_path / name)) for name in arguments[:split]]
    with pytest.raises(SystemExit) as stopped:
        main(["merge", str(checkpoint), *folders, str(tmp_path / "out"), *arguments[split:]])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

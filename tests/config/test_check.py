import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from helpers import weekly_but
from omegaconf import OmegaConf

from tune.cli.ls import settings_of
from tune.config import find_config, list_recipes_with_settings, load, read
from tune.config.check import OTHER_NAMES, walk
from tune.errors import TuneError


def findings(*arguments: str, default: str = "default.yaml") -> list[str]:
    with pytest.raises(TuneError) as caught:
        load(default, arguments)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def full_finetune(*arguments: str) -> list[str]:
    return findings("model.path=m", "dataset.path=d", *arguments, default="full_finetune")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(TuneError) as caught:
        load("full_finetune", ["model.path=m", "optimizer.lrr=1", "compute.dtype=fp8"])
    assert str(caught.value) == (
        "3 problems in the configuration:\n"
        "  dataset.path: is missing. Give it on the command line: dataset.path=...\n"
        "  optimizer.lrr: is not a setting. Did you mean 'optimizer.lr'?\n"
        "  compute.dtype: 'fp8' is not one of bf16, fp16, fp32."
    )


@pytest.mark.parametrize(
    ("argument", "finding"),
    [
        ("lr=1", "lr: is not a setting. Did you mean 'optimizer.lr'?"),
        ("packd=true", "packd: is not a setting. Did you mean 'packed'?"),
        ("compute.cpu_ofload=true", "compute.cpu_ofload: is not a setting. Did you mean 'compute.cpu_offload'?"),
        ("adapter_rank=x", "adapter_rank: is not a setting. --help lists all of them."),
        ("zzz.yyy=1", "zzz: is not a setting. --help lists all of them."),
        (
            "group_size=4",
            "group_size: is not a setting. It is one of grpo: use that recipe, or leave it out.",
        ),
        ("optimizer.warmup=3", "optimizer.warmup: is not a setting. Did you mean 'schedule.warmup'?"),
        ("dataset.fromat=x", "dataset.fromat: is not a setting. Did you mean 'dataset.format'?"),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate: is not a setting. Did you mean 'optimizer.lr'?"),
        ("learning_rate=1e-3", "learning_rate: is not a setting. Did you mean 'optimizer.lr'?"),
        ("optimizer.params=3", "optimizer.params: is given by the recipe itself, not in the configuration."),
        ("dataset.max_seq_len=3", "dataset.max_seq_len: is given by the recipe itself, not in the configuration."),
    ],
)
def test_unknown_key_gets_a_suggestion(argument: str, finding: str) -> None:
    assert full_finetune(argument) == [finding]


@pytest.mark.parametrize(
    ("given", "meant"),
    [("float32", "fp32"), ("torch.float32", "fp32"), ("half", "fp16"), ("float16", "fp16"), ("bfloat16", "bf16")],
)
def test_torchs_name_of_a_number_format_gets_a_suggestion(given: str, meant: str) -> None:
    (finding,) = full_finetune(f"compute.dtype={given}")
    assert finding.startswith(f"compute.dtype: '{given}' ") and finding.endswith(f"'{meant}'?")


@pytest.mark.parametrize(
    ("argument", "keys"),
    [
        ("batch_size=8", ["global_batch_size", "micro_batch_size"]),
        ("save_steps=8", ["checkpointer.every"]),
        ("bf16=true", ["compute.dtype"]),
        ("wandb.project=mine", ["trackers"]),
        ("lr_scheduler_type=cosine", ["schedule._component_"]),
    ],
)
def test_setting_of_another_library_gets_ours(argument: str, keys: list[str]) -> None:
    (problem,) = full_finetune(argument)
    assert re.findall("'(.*?)'", problem) == keys


ARGUMENT = "adapter.dora"  # of the default component of a setting that is null


@pytest.mark.slow
def test_names_of_other_libraries_stand_for_settings_of_recipes() -> None:
    keys = [f".{key}" for name in list_recipes_with_settings() for key in [*settings_of(find_config(name)), ARGUMENT]]
    for names in OTHER_NAMES.values():
        for name in names.split():
            assert any(key.endswith(f".{name}") for key in keys), name


@pytest.mark.parametrize(
    ("argument", "finding"),
    [
        ("micro_batch_size=0", "micro_batch_size: 0 is not a positive integer."),
        ("micro_batch_size=1.5", "micro_batch_size: 1.5 is not a positive integer."),
        ("micro_batch_size=true", "micro_batch_size: true is not a positive integer."),
        ("max_steps=-1", "max_steps: -1 is not a positive integer or null."),
        ("seed=-1", "seed: -1 is not a non-negative integer."),
        ("max_grad_norm=0", "max_grad_norm: 0 is not a positive number or null."),
        ("max_grad_norm=.inf", "max_grad_norm: inf is not a positive number or null."),
        ("optimizer.lr=-1", "optimizer.lr: -1 is not a number from 0 to 100."),
        ("optimizer.lr=fast", "optimizer.lr: 'fast' is not a number from 0 to 100."),
        ("optimizer.lr=.nan", "optimizer.lr: nan is not a number from 0 to 100."),
        (
            "optimizer.betas=[0.9]",
            "optimizer.betas: [0.9] is not a list of two or more numbers from 0 to below 1, such as [0.9, 0.95].",
        ),
        ("optimizer.betas=[0.9,1]", "optimizer.betas: in [0.9, 1], 1 is not a number from 0 to below 1."),
        (
            "optimizer.betas=0.9",
            "optimizer.betas: 0.9 is not a list of two or more numbers from 0 to below 1, such as [0.9, 0.95].",
        ),
        ("optimizer.betas=[0.9,1.5]", "optimizer.betas: in [0.9, 1.5], 1.5 is not a number from 0 to below 1."),
        ("parameter_groups.lr_ratios={a: -1}", "parameter_groups.lr_ratios: in {'a': -1}, -1 is not a number above 0"),
        ("optimizer.lr=1e38", "optimizer.lr: 1e+38 is not a number from 0 to 100."),
        ("optimizer.lr=1e400", "optimizer.lr: inf is not a number from 0 to 100."),
        ("optimizer.eps=0", "optimizer.eps: 0 is not a number from 1e-30 to 1"),
        ("optimizer.eps=1e-300", "optimizer.eps: 1e-300 is not a number from 1e-30 to 1"),
        ("optimizer.weight_decay=1e9", "optimizer.weight_decay: 1000000000.0 is not a number from 0 to 100."),
        ("epochs=.nan", "epochs: nan is not a number above 0"),
        ("epochs=-0.5", "epochs: -0.5 is not a number above 0"),
        ("epochs=1e18", "epochs: 1e+18 is not a number above 0"),
        ("seed=99999999999999999999", "seed: 99999999999999999999 is beyond 64 bits."),
        ("schedule.min_ratio=.inf", "schedule.min_ratio: inf is not a number from 0 to 1."),
        (
            "optimizer.betas.0=0.9",
            "optimizer.betas: {'0': 0.9} is not a list of two or more numbers from 0 to below 1, such as [0.9, 0.95].",
        ),
        (
            "optimizer={1: 2}",
            "optimizer.1: is not a setting. optimizer has: lr, betas, eps, weight_decay, amsgrad",
        ),
        ("optimizer._component_=null", "optimizer._component_: null is not a string."),
        ("compute.dtype=???", "compute.dtype: is missing. Give it on the command line: compute.dtype=..."),
        ("optimizer.lr=${oc.env:NOT_SET}", "optimizer.lr: KeyError raised while resolving interpolation"),
        ("optimizer.fused=1", "optimizer.fused: 1 is not true or false or null."),
        ("device=gpu", "device: 'gpu' is not one of auto, cpu, cuda, mps."),
        ("parallel.dp_shard=all", "parallel.dp_shard: 'all' is not a positive integer or auto."),
        ("packed=1", "packed: 1 is not true or false."),
        ("dataset.path=null", "dataset.path: null is not a string."),
        ("checkpointer.async=later", "checkpointer.async: 'later' is not true or false."),
        ("checkpointer.keep=0", "checkpointer.keep: 0 is not a positive integer or null."),
        ("loss.chunk_tokens=0", "loss.chunk_tokens: 0 is not a positive integer or null."),
        ("compute=full", "compute: is a group of keys, not the single value 'full'. Its keys:"),
        (
            "compute=null",
            "compute: is a group of keys, not the single value null. Leave it out to use its defaults. Its",
        ),
        ("optimizer=adam", "optimizer: is a group of keys, not the single value 'adam'. Its keys:"),
        ("seed.x=1", "seed: {'x': 1} is not a non-negative integer."),
        ("seed._component_=torch.optim.SGD", "seed: {'_component_': 'torch.optim.SGD'} is not a non-negative integer."),
        ("max_steps.x=1", "max_steps: {'x': 1} is not a positive integer or null."),
    ],
)
def test_invalid_value_is_reported(argument: str, finding: str) -> None:
    (problem,) = full_finetune(argument)
    assert problem.startswith(finding)


def test_component_given_in_place_of_its_group() -> None:
    (problem,) = full_finetune("loss=tune.losses.linearCrossEntropy")
    assert "loss._component_=tune.losses.linearCrossEntropy" in problem and "'LinearCrossEntropy'?" in problem


def test_value_interpolated_from_another_setting_is_checked(folder: Path) -> None:
    problems = findings("name=run", "epochs=many", "writer.every=${epochs}")
    assert [problem.partition(":")[0] for problem in problems] == ["epochs"]
    problems = findings("name=run", "epochs=0", "writer.every=${epochs}")
    assert [problem.partition(":")[0] for problem in problems] == ["writer.every"]


@pytest.mark.parametrize(
    ("component", "finding"),
    [
        ("torch.optim.AdanW", "torch.optim has no 'AdanW'. Did you mean 'AdamW'?"),
        ("torch.optim.adagrad_", "torch.optim has no 'adagrad_'. Did you mean 'Adagrad'?"),
        ("torch.optm.AdamW", "torch has no 'optm'. Did you mean 'optim'?"),
        (
            "tunes.losses.DPO",
            "there is no module 'tunes'. Is it installed, or in the current folder? Did you mean 'tune'?",
        ),
        ("tune.optimizer.Muon", "tune has no 'optimizer'. Did you mean 'optimizers'?"),
        ("torhc.optim.AdamW", "there is no module 'torhc'. Is it installed, or in the current folder?"),
        ("AdamW", "'AdamW' is not the dotted path of a function or class. Include its module: my_module.AdamW"),
        ("parts.py:Steady", "'parts.py:Steady' is not the dotted path of a function or class. Write parts.Steady."),
        ("my-parts.AdamW", "'my-parts.AdamW' is not the dotted path of a function or class."),
        ("torch.optim.adamw", "'torch.optim.adamw' is a module, not a function or class."),
    ],
)
def test_component_that_does_not_exist(component: str, finding: str) -> None:
    assert full_finetune(f"optimizer._component_={component}") == [f"optimizer._component_: {finding}"]


def test_missing_optimizer_package_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert full_finetune("optimizer._component_=torchao.optim.AdamW8bit") == [
        "optimizer._component_: there is no module 'torchao'. It comes with: pip install 'tune-recipes[torchao]'"
    ]


def test_untyped_settings_keep_the_type_of_their_default(folder: Path) -> None:
    assert findings("name=run", "threshold=high", "tags=a") == [
        "threshold: 'high' is not a number.",
        "tags: 'a' is not a list. Write it as one: [a].",
    ]
    assert load("default.yaml", ["name=run", "threshold=1", "note=[1]"]).note == [1]


def test_unresolved_interpolation_is_reported(folder: Path) -> None:
    assert findings("name=run", "note=${nam}") == ["note: Interpolation key 'nam' not found."]
    assert findings("name=run", "part.name=${part.lrr}") == ["part.name: Interpolation key 'part.lrr' not found."]
    assert findings("name=run", "tags=['${nam}']") == ["tags: Interpolation key 'nam' not found."]


def test_circular_interpolations_are_reported(folder: Path) -> None:
    assert len(findings("name=${note}", "note=${name}")) == 3


def test_missing_value_is_reported_once_despite_references(folder: Path) -> None:
    assert findings() == ["name: is missing. Give it on the command line: name=..."]


def test_problems_name_their_file(folder: Path) -> None:
    (folder / "mine.yaml").write_text("name: run\nepochs: many\nepoch: 2\ncompute.cpu_offload: true\npart: {lrr: 1}\n")
    assert findings("--config", "mine.yaml") == [
        "epoch: is not a setting. Did you mean 'epochs'? (mine.yaml)",
        "compute.cpu_offload: is not a setting. In a file, nest it: compute: {cpu_offload: ...} (mine.yaml)",
        "epochs: 'many' is not an integer. (mine.yaml)",
        "part.lrr: is not a setting. Did you mean 'part.lr'? (mine.yaml)",
    ]


def test_another_component_inherits_only_arguments_it_takes(folder: Path) -> None:
    cfg = load("default.yaml", ["name=run", "part._component_=parts.Rising", "part.growth=0.1"])
    assert cfg.part == {"_component_": "parts.Rising", "lr": 0.1, "growth": 0.1}


@pytest.mark.parametrize(
    ("component", "inherited"),
    [
        ("torch.optim.SGD", {"lr", "weight_decay"}),
        ("tune.optimizers.Adafactor", {"lr", "weight_decay"}),
        ("tune.optimizers.Muon", {"lr", "weight_decay", "betas"}),
        ("torchao.optim.AdamW8bit", {"lr", "weight_decay", "betas"}),
        ("torchao.optim.AdamW4bit", {"lr", "weight_decay", "betas"}),
        ("torchao.optim.AdamWFp8", {"lr", "weight_decay", "betas"}),
    ],
)
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_optimizers_can_be_exchanged_by_name(recipe: str, component: str, inherited: set[str]) -> None:
    needed = ["model.path=m", "dataset.path=d"]
    default = load(recipe, needed).optimizer
    optimizer = load(recipe, [*needed, f"optimizer._component_={component}"]).optimizer
    assert optimizer == {"_component_": component} | {name: default[name] for name in inherited}


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        (["optimizer._component_=torch.optim.Muon"], "optimizer._component_: torch.optim.Muon "),
        (
            ["optimizer._component_=torch.optim.Adafactor"],
            "optimizer._component_: torch.optim.Adafactor ",
        ),
        (
            ["optimizer._component_=torchao.optim.CPUOffloadOptimizer"],
            "optimizer._component_: torchao.optim.CPUOffloadOptimizer ",
        ),
        (
            ["optimizer._component_=torchao.optim.AdamW8bit", "optimizer.fused=true"],
            "optimizer.fused: AdamW8bit has no argument 'fused'. It has: lr, betas,",
        ),
        (
            ["optimizer._component_=torch.optim.SGD", "optimizer.betas=[0.9,0.99]"],
            "optimizer.betas: SGD has no argument 'betas'. It has: lr, momentum,",
        ),
        (
            ["loss._component_=torch.nn.CrossEntropyLoss"],
            "loss._component_: torch.nn.CrossEntropyLoss ",
        ),
        (["optimizer.lr=20", "optimizer.weight_decay=0.1"], "optimizer.weight_decay: optimizer.lr=20 times 0.1 is"),
        (["checkpointer.keep_best=validation_loss"], "checkpointer.keep_best: "),
        (["compute.dtype=fp16", "compute.master_dtype=bf16"], "compute.master_dtype: compute.dtype=fp16 "),
        (
            ["compute.activation_offload=true", "compute.activation_checkpointing=selective"],
            "compute.activation_offload: with activation_checkpointing=selective",
        ),
    ],
)
def test_conflicting_settings_are_reported(arguments: list[str], finding: str) -> None:
    (problem,) = full_finetune(*arguments)
    assert problem.startswith(finding)


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        (["evaluate.tasks=[arc_easy]"], "evaluate.tasks: it needs all blocks in one process (got parallel.pp=2)"),
        (
            ["evaluate.prompts=questions.txt"],
            "evaluate.prompts: it needs all blocks in one process (got parallel.pp=2)",
        ),
        (
            ["parallel.pp_schedule=dualpipe"],
            "parallel.pp_schedule: 'dualpipe' is not one of gpipe, 1f1b, interleaved, zero_bubble",
        ),
        (["parallel.pp_virtual=0"], "parallel.pp_virtual: 0 is not a positive integer"),
        (["model.quantization=nf4"], "model.quantization: "),
    ],
)
def test_settings_that_conflict_with_pipeline_stages(arguments: list[str], finding: str) -> None:
    (problem,) = findings("model.path=m", "dataset.path=d", "parallel.pp=2", *arguments, default="pipeline_finetune")
    assert problem.startswith(finding)


def test_invalid_settings_cause_no_conflict_messages() -> None:
    counts = "parallel.tp", "max_grad_norm", "evaluate.every", "checkpointer.patience"
    others = [
        "model.float8=rowwise",
        "evaluate.tasks=[]",
        "loss._component_=no.no",
    ]
    problems = full_finetune(*(f"{key}=two" for key in counts), *others)
    assert sorted(problem.partition(":")[0] for problem in problems) == sorted([*counts, "loss._component_"])
    problems = findings(
        "model.path=m", "dataset.path=d", "loss._component_=no.no", "reference=adapter_off", default="grpo"
    )
    assert [problem.partition(":")[0] for problem in problems] == ["reward", "loss._component_", "reference"]


@pytest.mark.slow
def test_environment_must_be_a_dotted_path() -> None:
    required = "model.path=m", "dataset.path=d"
    (message,) = findings(
        *required, "reward=tune.evaluation.exact_match", "environment._component_=my.Game", default="grpo"
    )
    assert message.startswith("environment: {'_component_': 'my.Game'} is not a string")
    (message,) = findings(*required, "reward=null", default="grpo")
    assert message.startswith("reward: null ") and "environment" in message
    problems = findings(*required, "reward=null", default="ppo_finetune")
    assert any(problem.startswith("reward: null") and "environment" not in problem for problem in problems)


def test_setting_that_a_copy_lacks_names_its_file(folder: Path) -> None:
    (finding,) = findings("name=run", "global_batch_size=8")
    assert finding.count("default.yaml") == 2 and "full_finetune" in finding and "use that" not in finding


def test_invalid_setting_with_references_is_reported_once() -> None:
    assert findings("model.path=", "dataset.path=d", default="full_finetune") == ["model.path: null is not a string."]


@pytest.mark.slow
def test_pipeline_settings_of_other_recipes_and_recomputed_dropout() -> None:
    paths = ["model.path=m", "dataset.path=d", "parallel.pp=2"]
    others = "It is one of pipeline_finetune: use that recipe, or leave it out."
    for recipe in ("full_finetune", "lora_finetune", "preference_finetune"):
        problems = findings(*paths, "parallel.pp_schedule=gpipe", "parallel.pp_virtual=2", default=recipe)
        assert problems == [
            f"parallel.{key}: is not a setting. {others}" for key in ("pp", "pp_schedule", "pp_virtual")
        ]
    recomputed = ["adapter.dropout=0.1", "compute.activation_checkpointing=selective"]
    assert load("pipeline_finetune", [*paths, *recomputed]).adapter.dropout == 0.1
    (problem,) = findings(*paths, *recomputed, "compute.compile=true", default="pipeline_finetune")
    assert problem.startswith("adapter.dropout: with parallel.pp=2")
    twice = ["parallel.pp_schedule=zero_bubble", "compute.activation_checkpointing=selective", "compute.compile=true"]
    problems = findings(*paths, *twice, default="pipeline_finetune")
    assert ["parallel.pp_schedule=zero_bubble" in problem for problem in problems] == [True, True]


def test_selective_checkpointing_can_offload_from_compiled_blocks() -> None:
    memory = ["compute.activation_offload=true", "compute.activation_checkpointing=selective"]
    assert load("full_finetune", ["model.path=m", "dataset.path=d", *memory, "compute.compile=true"]).compute.compile


MIX = "dataset._component_=tune.datasets.mix"
HELD_OUT = "{chats: {path: c, validation_fraction: 0.1}, code: {path: d}}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["dataset.path=d", "dataset.validation_fraction=0.1"],
        ["dataset.path=d", "dataset.validation_fraction=0", "dataset.validation=v"],
        ["dataset.path=d", "dataset.validation.path=v", "dataset.validation.take=5"],
        ["dataset.path=d", "dataset.validation={split: test}"],
        [MIX, f"dataset.sources={HELD_OUT}"],
    ],
)
def test_rows_held_out_or_validation_data(arguments: list[str]) -> None:
    assert load("full_finetune", ["model.path=m", *arguments]).dataset


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        (
            ["dataset.path=d", "dataset.validation=v", "dataset.validation.take=5"],
            "dataset.validation: is given as 'v'",
        ),
        ([MIX, f"dataset.sources={HELD_OUT}", "dataset.validation=v"], "dataset.validation: mix has no argument"),
    ],
)
def test_validation_data_are_an_argument_of_the_dataset(arguments: list[str], finding: str) -> None:
    """Of a mixture, an argument of each source."""
    (problem,) = findings("model.path=m", *arguments, default="full_finetune")
    assert problem.startswith(finding)


# Settings of earlier versions, what names them now, and an example of their value.
MOVED = {
    "dtype=bf16": "compute.dtype=bf16", "master_dtype=bf16": "compute.master_dtype=bf16",
    "compile=true": "compute.compile=true", "deterministic=true": "parallel.deterministic=true",
    "memory.activation_checkpointing=full": "compute.activation_checkpointing=full",
    "memory.activation_offload=true": "compute.activation_offload=true",
    "memory.cpu_offload=true": "compute.cpu_offload=true", "validate_every=5": "evaluate.every=5",
    "memory.loss_chunk_tokens=9": {
        "full_finetune": "loss.chunk_tokens=9", "lora_finetune": "loss.chunk_tokens=9",
        "pipeline_finetune": "loss.chunk_tokens=9", "distill": "loss.chunk_tokens=9",
        "preference_finetune": "loss_chunk_tokens=9", "grpo": "loss_chunk_tokens=9",
        "ppo_finetune": "loss_chunk_tokens=9", "reward_finetune": "",
    },
    "validate_first=true": "evaluate.first=true", "validation_dataset.path=v": "dataset.validation=v",
    "validation_dataset._component_=tune.datasets.load": "dataset.validation=v",
    "quantization.weights=nf4": "model.quantization=nf4",
    "quantization.double=false": "model.double_quantization=false",
    "quantization.float8=rowwise": "model.float8=rowwise", "logger.trackers=[a.B]": "trackers=[a.B]",
    "logger.tensorboard=true": "trackers=[tune.loggers.TensorBoard]",
    "logger.wandb.project=x": "trackers=[{_component_: tune.loggers.WeightsAndBiases, project: ...}]",
    "logger.wandb.name=x": "trackers=[{_component_: tune.loggers.WeightsAndBiases, project: ...}]",
    "logger.console_every=10": "trackers=[{_component_: tune.loggers.Console, every: ...}]",
}  # fmt: skip
EDITED = {
    "quantization.qat=int4": "Weights rounded in training", "from_scratch=true": "Random initial weights",
    "profiler.start=3": "A trace of some steps", "profiler.steps=3": "A trace of some steps",
    "export.dtype=bf16": "Another type of the exported weights",
}  # fmt: skip
TRAINING = [name for name in list_recipes_with_settings() if name != "evaluate"]
MOVES = [(recipe, old, new) for recipe in TRAINING for old, new in MOVED.items()]


def told(recipe: str, *arguments: str, imports: bool = True) -> list[str]:
    """Return the problems of a run with these settings and all that the recipe needs."""
    needed = ["model.path=m", "dataset.path=d", "teacher.path=t", "reward=tune.evaluation.exact_match", "value.path=v"]
    known = settings_of(find_config(recipe))
    needed = [each for each in needed if each.partition("=")[0] in known]
    return read(recipe, [*needed, *arguments], imports=imports)[1]


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize(
    ("recipe", "old", "new"), weekly_but([each for each in MOVES if each[0] in ("full_finetune", "grpo")], MOVES)
)
def test_setting_with_another_name_now_is_an_error_that_gives_it(recipe: str, old: str, new: Any) -> None:
    new = new[recipe] if isinstance(new, dict) else new
    (problem,), (unimported,) = told(recipe, old), told(recipe, old, imports=False)
    assert (problem == unimported or not new) and " is not a setting. It is " in problem
    name = new if "..." in new or "TensorBoard" in new else new.partition("=")[0]
    assert f"It is {name} now." in problem or not new
    if new and "..." not in new:
        assert not [each for each in told(recipe, new) if "is not a setting" in each]


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("old", EDITED)
@pytest.mark.parametrize("recipe", weekly_but(["lora_finetune"], TRAINING))
def test_setting_that_is_an_edit_now_is_an_error_that_names_its_section(recipe: str, old: str) -> None:
    for imports in (True, False):
        (problem,) = told(recipe, old, imports=imports)
        assert " is not a setting. " in problem and f"docs/changes.md, '{EDITED[old]}'." in problem


@pytest.mark.slow
def test_group_of_an_earlier_version_names_all_of_its_settings(folder: Path) -> None:
    """As in the config.yaml of an earlier run, or with a misspelled setting."""
    (folder / "mine.yaml").write_text(
        "quantization: {qat: null, weights: nf4, double: true}\nprofiler: {start: null}\n"
    )
    one, two = findings("model.path=m", "dataset.path=d", "--config", "mine.yaml", default="lora_finetune")
    assert one.startswith("quantization: ") and "model.quantization and model.double_quantization" in one
    assert "quantization.qat is an edit" in one and "'Weights rounded in training'" in one
    assert two.startswith("profiler: ") and "'A trace of some steps'" in two
    for given in ("memory.cpu_ofload=true", "memory=full"):
        (problem,) = full_finetune(given)
        assert "compute.cpu_offload" in problem and "loss.chunk_tokens" in problem


UNLISTED = {  # settings that no YAML lists, with a right and a wrong value
    "parallel.timeout": ("30", "x"), "parallel.deterministic": ("true", "often"),
    "parallel.loss_parallel": ("false", "3"), "parallel.reduce_every_micro_batch": ("false", "3"),
    "parallel.plan": ("{'blocks.*.mlp': rows}", "5"), "parameter_groups.decay_vectors": ("true", "x"),
    "adapter.dora": ("true", "x"), "adapter.init": ("pissa", "x"), "dataset.on_bad_row": ("skip", "x"),
    "dataset.turns": ("as_seen", "5"), "dataset.split": ("test", "null"), "dataset.too_long": ("drop", "x"),
    "evaluate.limit": ("5", "x"), "evaluate.general_limit": ("0.5", "x"), "loss.accuracy": ("true", "x"),
    "model.double_quantization": ("false", "x"), "model.float8": ("rowwise", "x"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("key", UNLISTED)
def test_settings_that_are_not_listed_are_known_by_their_function(key: str) -> None:
    right, wrong = UNLISTED[key]
    listed = dict(walk(cast(Any, OmegaConf.to_container(OmegaConf.load(find_config("lora_finetune"))))))
    assert key not in listed and key in settings_of(find_config("lora_finetune"))
    assert not [
        each for each in told("lora_finetune", f"{key}={right}") if each.startswith(key) and "effect" not in each
    ]
    (problem,) = [each for each in told("lora_finetune", f"{key}={wrong}") if "effect" not in each]
    assert problem.startswith(f"{key}: ") and "is not a setting" not in problem
    (problem,) = told("lora_finetune", f"{key}s={right}")
    assert problem.startswith(f"{key}s: is not a setting.") and f"'{key}'?" in problem


@pytest.mark.slow
def test_settings_that_another_recipe_lists_are_refused_in_plain_groups() -> None:
    """The function has them, but the loop of this recipe has no stages."""
    assert "parallel.pp" in settings_of(find_config("pipeline_finetune"))
    assert "parallel.pp" not in settings_of(find_config("lora_finetune"))
    for key in ("parallel.pp", "parallel.pp_virtual"):
        (problem,) = told("lora_finetune", f"{key}=2")
        assert problem.startswith(f"{key}: is not a setting. It is one of pipeline_finetune")
        assert told("pipeline_finetune", "parallel.pp=2", f"{key}=2") == []


@pytest.mark.slow
def test_arguments_that_the_recipe_gives_itself_are_no_settings() -> None:
    for key in ("parallel.device", "compute.model", "compute.world", "parameter_groups.lr"):
        (problem,) = told("full_finetune", f"{key}=5")
        assert problem.startswith(f"{key}: is not a setting.")


@pytest.mark.slow
def test_arguments_of_the_recipe_are_recognized_by_name() -> None:
    cycle = ["schedule._component_=torch.optim.lr_scheduler.OneCycleLR", "schedule.max_lr=0.001"]
    assert load("full_finetune", ["model.path=m", "dataset.path=d", *cycle]).schedule.max_lr == 0.001
    assert "by the recipe" in "".join(full_finetune(*cycle, "schedule.total_steps=3"))


def test_explicit_arguments_of_another_component_are_checked_strictly(folder: Path) -> None:
    assert findings("name=run", "part._component_=parts.Rising", "part.name=x", "part.growth=1") == [
        "part.name: Rising has no argument 'name'. Did you mean 'name'?",
        "part.growth: 1 is not a number from 0 to below 1.",
    ]


def test_file_naming_the_default_component_changes_nothing(folder: Path) -> None:
    (folder / "mine.yaml").write_text("name: run\npart: {_component_: parts.Steady}\n")
    assert load("default.yaml", ["--config", "mine.yaml"]).part.lr == 0.1


def test_component_on_the_command_line_drops_arguments_from_a_file(folder: Path) -> None:
    (folder / "mine.yaml").write_text("name: run\npart: {_component_: parts.Rising, growth: 0.1}\n")
    cfg = load("default.yaml", ["--config", "mine.yaml", "part._component_=parts.Steady"])
    assert cfg.part == {"_component_": "parts.Steady", "lr": 0.1, "name": "run"}


def test_component_may_take_any_arguments(folder: Path) -> None:
    cfg = load("default.yaml", ["name=run", "part._component_=parts.anything", "part.new.deep=1"])
    assert cfg.part == {"_component_": "parts.anything", "lr": 0.1, "name": "run", "new": {"deep": 1}}


def test_component_may_replace_a_null_default(folder: Path) -> None:
    cfg = load("default.yaml", ["name=run", "note._component_=parts.Writer", "note.folder=out"])
    assert cfg.note.folder == "out"
    assert findings("name=run", "note._component_=parts.Writer", "note.every=0", "note.fold=out") == [
        "note.every: 0 is not a positive integer.",
        "note.fold: Writer has no argument 'fold'. Did you mean 'note.folder'?",
    ]


def test_null_default_may_be_repeated() -> None:
    arguments = ["model.path=m", "dataset.path=d", "dataset.validation=null", "max_steps=null"]
    assert load("full_finetune", arguments).dataset.validation is None


def test_without_imports_keys_are_checked_but_not_values() -> None:
    arguments = [
        "lr=1",
        "seed=many",
        "max_grad_norm=null",
        "compute.compile=[blocks.0]",
        "optimizer.lrr=1",
        "optimizer.lr=-1",
        "dataset._component_=nowhere.mix",
    ]
    assert read("full_finetune", arguments, imports=False)[1] == [
        "lr: is not a setting. Did you mean 'optimizer.lr'?",
        "model.path: is missing. Give it on the command line: model.path=...",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_checks_without_imports_accept_valid_settings(recipe: str) -> None:
    """Arguments that another component may not take stay in place, so they may be missing or null."""
    sources = "{a: {path: a, validation_fraction: 0.1}}"
    mixes = [
        *("dataset._component_=tune.datasets.mix", f"dataset.sources={sources}", "evaluate.every=1"),
    ]
    validated = ["dataset.path=d", "dataset.validation.path=v", "evaluate.first=true"]
    for arguments in (["dataset.path=d"], mixes, validated):
        assert not read(recipe, ["model.path=m", *arguments])[1]
        assert not read(recipe, ["model.path=m", *arguments], imports=False)[1]


@pytest.mark.slow
def test_settings_reject_nonfinite_numbers(folder: Path) -> None:
    for value in (".nan", ".inf", "-.inf", "1e400"):
        for key in ("threshold", "part.lr", "note", "tags", "writer.every"):
            argument = f"{key}=[{value}]" if key in ("note", "tags") else f"{key}={value}"
            (problem,) = findings("name=run", argument)
            assert problem.startswith(f"{key}: ")


@pytest.mark.parametrize("component", ["torchao.optim.AdamW8bit", "tune.optimizers.Muon", "torch.optim.AdamW"])
def test_advice_for_a_single_beta_is_valid(component: str) -> None:
    (problem,) = full_finetune(f"optimizer._component_={component}", "optimizer.betas=0.9")
    assert problem.startswith("optimizer.betas: 0.9 ") and "[0.9]" not in problem


@pytest.mark.parametrize("value", ["0.5", "1.5", "3.0", "2", "1e-3"])
def test_epochs_may_be_fractions(value: str) -> None:
    assert load("full_finetune", ["model.path=m", "dataset.path=d", f"epochs={value}"]).epochs == float(value)
    assert load("grpo", ["model.path=m", "dataset.path=d", "reward=tune.evaluation.exact_match", f"epochs={value}"])


def test_invalid_settings_are_returned_as_their_defaults() -> None:
    wrong = [
        "max_steps=-1",
        "optimizer._component_=no.no",
        "optimizer.lr=1",
        "parallel.cp=${nope}",
        "compute.compile={a: 1}",
    ]
    cfg, problems = read("full_finetune", ["model.path=null", "dataset.path=d", *wrong])
    assert {problem.partition(":")[0] for problem in problems} == {
        "max_steps", "optimizer._component_", "parallel.cp", "compute.compile", "model.path",
    }  # fmt: skip
    default = load("full_finetune", ["model.path=m", "dataset.path=d"])
    for key in ("max_steps", "optimizer", "parallel", "compute"):
        assert cfg[key] == default[key]
    assert cfg.model.path is None and cfg.dataset.path == "d"
    cfg, _ = read("full_finetune", ["dataset.path=d"])
    assert OmegaConf.is_missing(cfg.model, "path")


@pytest.mark.parametrize(
    "text",
    [b"a: " + b"[" * 3000 + b"]" * 3000, b"seed: \x00", b"\xff\xfe", b"- 1", b"seed:\n\t1", b"null: 1", b"a: &a [*a]"],
)
def test_unreadable_file_is_named(text: bytes, folder: Path) -> None:
    (folder / "mine.yaml").write_bytes(text)
    with pytest.raises(TuneError, match=r"mine\.yaml"):
        load("default.yaml", ["--config", "mine.yaml", "name=run"])


def test_config_name_that_no_file_can_have(folder: Path) -> None:
    with pytest.raises(TuneError, match="there is no config"):
        load("default.yaml", ["--config", "x" * 300])

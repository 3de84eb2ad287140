"""All parts of the benchmark, in the order of execution."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bench import Bench, Check, Failed, Result, Run, Sampling, Training, at_once

TIMED = slice(3, 8)  # steps of a run


@dataclass(frozen=True)
class Part:
    """A measurement by `measure(bench, name)`. It needs the checkpoints of `shapes`, packages, and GiB of the device's
    memory; without packages or memory it is skipped."""

    measure: Callable[[Bench, str], Iterable[Result]]
    shapes: tuple[str, ...] = ("tiny",)
    packages: tuple[str, ...] = ()
    memory: float = 0.0


# Correctness. All parts run at once and share the device.

TEN_STEPS = (
    "max_seq_len=512", "global_batch_size=4", "micro_batch_size=2", "max_steps=10", "optimizer.lr=1e-3",
)  # fmt: skip
OFFLOAD = "compute.activation_offload=true"


def curve(recipe: str, *settings: str, shape: str = "tiny", on_device: tuple[str, ...] = ()) -> Part:
    """Check that ten fp32 steps on the device, with further settings, have the losses of the CPU."""

    def measure(bench: Bench, name: str) -> Iterable[Result]:
        inputs = (
            f"model.path={bench.model(shape)}",
            f"dataset.path={bench.chats}",
            "compute.dtype=fp32",
            *TEN_STEPS,
            *settings,
        )
        further = () if bench.device == "cpu" and OFFLOAD in on_device else on_device  # no offload on a CPU
        device, cpu = at_once(
            lambda: bench.recipe(f"{name}-device", recipe, *inputs, *further, limit=150),
            lambda: bench.recipe(f"{name}-cpu", recipe, *inputs, "device=cpu", limit=150),
        )
        yield Check(f"{name}: loss of {len(cpu.curve())} steps, fp32, to the CPU's", apart(device, cpu), 1e-5)
        yield Check(f"{name}: gradient norm", apart(device, cpu, "grad_norm"), 1e-3)

    return Part(measure, (shape,))


def apart(run: Run, reference: Run, name: str = "loss") -> float:
    """Return the largest difference over all steps, relative for values above 1."""
    found, expected = run.curve(name), reference.curve(name)
    if found.keys() != expected.keys() or not found:
        raise Failed(f"{run.folder.name} logged steps {[*found]}, {reference.folder.name} {[*expected]}")
    return max(abs(found[step] - value) / max(1.0, abs(value)) for step, value in expected.items())


def bf16_and_resume(bench: Bench, name: str) -> Iterable[Result]:
    """Check that bf16 follows fp32, and that a second run and a killed and continued run follow the first."""
    model = f"model.path={bench.model('tiny')}", f"dataset.path={bench.chats}", "packed=true", *TEN_STEPS
    settings = *model, "compute.dtype=bf16", "checkpointer.every=2"

    def killed() -> Run:
        run = bench.recipe(f"{name}-killed", "full_finetune", *settings, limit=100, steps=5)
        if len(run.steps()) == 10:
            raise Failed("the run ended before it was killed")
        return bench.recipe(f"{name}-killed", "full_finetune", *settings, limit=100)

    exact, first, second, continued = at_once(
        lambda: bench.recipe(f"{name}-fp32", "full_finetune", *model, "compute.dtype=fp32", limit=100),
        lambda: bench.recipe(f"{name}-first", "full_finetune", *settings, limit=100),
        lambda: bench.recipe(f"{name}-second", "full_finetune", *settings, limit=100),
        killed,
    )
    yield Check("bf16: loss vs. fp32", apart(first, exact), 1e-2)
    yield Check("bf16: loss of the same run again", apart(second, first), 1e-3)
    yield Check("bf16: loss of a run killed after step 5 and continued", apart(continued, first), 1e-3)


def check(what: str) -> Part:
    """Run checks.py and return its results."""

    def measure(bench: Bench, name: str) -> Iterable[Result]:
        arguments = what, "--device", bench.device, "--model", bench.model("tiny")
        return [Check(*line) for line in bench.script("checks.py", *arguments, limit=120)]

    return Part(measure)


CORRECTNESS = {
    "attention": check("attention"),
    "nf4": check("nf4"),
    "sampler": check("sampler"),
    "bf16-and-resume": Part(bf16_and_resume),
    "curve-full": curve("full_finetune"),
    "curve-packed": curve("full_finetune", "packed=true"),
    "curve-compiled": curve("full_finetune", "packed=true", on_device=("compute.compile=true",)),
    "curve-offload": curve("full_finetune", "packed=true", on_device=(OFFLOAD,)),
    "curve-moe": curve("full_finetune", "packed=true", shape="tiny-moe"),
    "curve-lora-dropout": curve("lora_finetune", "packed=true", "adapter.dropout=0.1"),
    "curve-dora": curve("lora_finetune", "packed=true", "adapter.dora=true"),
    "curve-qlora": curve("lora_finetune", "packed=true", "model.quantization=nf4"),
}

# Speed. Each part has the device for itself.


def packed(bench: Bench, rows: int, micro_batch: int) -> list[str]:
    sizes = f"max_seq_len={bench.length}", f"global_batch_size={rows}", f"micro_batch_size={micro_batch}"
    return ["packed=true", *sizes]


def training(
    title: str, recipe: str, shape: str, *settings: str, rows: int = 4, micro_batch: int = 2, memory: float,
    limit: float = 100,
) -> Part:  # fmt: skip
    """Return medians of a recipe's steps; the recipe is stopped after them."""

    def measure(bench: Bench, name: str) -> Iterable[Result]:
        data = f"dataset.path={bench.chats}", *packed(bench, rows, micro_batch)
        yield timed_run(bench, name, title, recipe, shape, *data, *settings, limit=limit, timed=TIMED, steps=TIMED.stop)

    return Part(measure, (shape,), memory=memory)


def timed_run(
    bench: Bench, name: str, title: str, recipe: str | Path, shape: str, *settings: str, limit: float, timed: slice,
    steps: int, processes: int = 1,
) -> Training:  # fmt: skip
    """Return medians of the `timed` steps among the first `steps` of a recipe. A single process is then killed to save
    the time of the export; several end normally, since torchrun's processes are not in its process group."""
    of_all = [f"model.path={bench.model(shape)}", "checkpointer.every=null", "epochs=100"]
    if bench.tiny:
        of_all.append("compute.dtype=fp32")
    if processes > 1:
        run = bench.recipe(name, recipe, *of_all, *settings, f"max_steps={steps}", limit=limit, processes=processes)
    else:
        run = bench.recipe(name, recipe, *of_all, *settings, limit=limit, steps=steps)
    entries = run.steps()

    def median(metric: str) -> float | None:
        values = [entry[metric] for entry in entries[timed] if metric in entry]
        return statistics.median(values) if values else None

    return Training(
        title, median("tokens_per_second"), median("step_seconds"), run.start,
        max(entry["peak_memory_gib"] for entry in entries), median("mfu"), median("rollout_seconds"),
    )  # fmt: skip


def grpo(bench: Bench, name: str) -> Iterable[Result]:
    settings = [
        f"dataset.path={bench.prompts}", "reward=rewards.different_letters", "prompts_per_step=8", "group_size=8",
        "micro_batch_size=16", f"sampling.max_new_tokens={bench.new_tokens}",
    ]  # fmt: skip
    title = "GRPO, 1B, 8 x 8 completions of 128"
    yield timed_run(bench, name, title, "grpo", "llama-1b", *settings, limit=100, timed=slice(2, 5), steps=5)


def sampling(title: str, shape: str, rows: int, memory: float, library: str = "tune") -> Part:
    def measure(bench: Bench, name: str) -> Iterable[Result]:
        size = "--rows", str(rows), "--new", str(bench.new_tokens), "--library", library, "--device", bench.device
        (found,) = bench.script("sample.py", bench.model(shape), *size, limit=100)
        yield Sampling(title, rows, bench.new_tokens, found["seconds"], found["peak_gib"])

    return Part(measure, (shape,), () if library == "tune" else (library,), memory)


def trl(title: str, shape: str, rank: int, *more: str, rows: int = 4, micro_batch: int = 2, memory: float) -> Part:
    def measure(bench: Bench, name: str) -> Iterable[Result]:
        size = "--rows", str(rows), "--micro-batch", str(micro_batch), "--max-length", str(bench.length)
        inputs: tuple[str | Path, ...] = bench.model(shape), bench.chats
        (found,) = bench.script(
            "trl_sft.py", *inputs, *size, "--rank", str(rank), "--device", bench.device, *more, limit=100
        )
        yield Training(title, **found)

    return Part(measure, (shape,), ("trl", "peft", *(["liger-kernel"] if more else [])), memory)


LORA_8B = "LoRA r16, 8B, 2 x 2 rows of 4,096"
FULL_1B = "full, 1B, 2 x 4 rows of 4,096"
LORA_1B = "LoRA r16, 1B, 2 x 2 rows of 4,096"
EIGHT = {"rows": 8, "micro_batch": 4}
SPEED = {
    "lora-8b": training(LORA_8B, "lora_finetune", "llama-8b", memory=62),
    "full-1b": training(FULL_1B, "full_finetune", "llama-1b", **EIGHT, memory=46),
    "sample-1b": sampling("1B", "llama-1b", 64, memory=8),
    "grpo-1b": Part(grpo, ("llama-1b",), memory=30),
    "lora-8b-compiled": training(f"{LORA_8B}, compile", "lora_finetune", "llama-8b", "compute.compile=true", memory=55),
    "lora-8b-offload": training(f"{LORA_8B}, activations offloaded", "lora_finetune", "llama-8b", OFFLOAD, memory=40),
    "full-1b-compiled": training(
        f"{FULL_1B}, compile", "full_finetune", "llama-1b", "compute.compile=true", **EIGHT, memory=42
    ),
    "lora-1b": training(LORA_1B, "lora_finetune", "llama-1b", memory=16),
    "lora-1b-compiled": training(f"{LORA_1B}, compile", "lora_finetune", "llama-1b", "compute.compile=true", memory=16),
    "lora-1b-dropout": training(
        f"{LORA_1B}, dropout 0.05", "lora_finetune", "llama-1b", "adapter.dropout=0.05", memory=16
    ),
    "dora-1b": training(f"{LORA_1B}, DoRA", "lora_finetune", "llama-1b", "adapter.dora=true", memory=28),
    "qlora-8b": training(f"Q{LORA_8B}", "lora_finetune", "llama-8b", "model.quantization=nf4", memory=50),
    "lora-moe": training(LORA_1B.replace("1B", "MoE"), "lora_finetune", "qwen3-moe", memory=30),
    "sample-1b-one-row": sampling("1B", "llama-1b", 1, memory=6),
    "sample-8b-one-row": sampling("8B", "llama-8b", 1, memory=20),
    "trl-lora-8b": trl(f"TRL: {LORA_8B}", "llama-8b", 16, memory=78),
    "trl-liger-lora-8b": trl(f"TRL with Liger: {LORA_8B}", "llama-8b", 16, "--liger", memory=68),
    "trl-liger-full-1b": trl(f"TRL with Liger: {FULL_1B}", "llama-1b", 0, "--liger", **EIGHT, memory=60),
    "transformers-sample-1b": sampling("1B, transformers", "llama-1b", 64, memory=8, library="transformers"),
}

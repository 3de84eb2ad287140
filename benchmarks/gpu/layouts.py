"""The parts for 2 to 8 devices: curves and communication of all layouts."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from bench import ROOT, Bench, Check, Result, Run, Skipped, Traffic
from parts import Part, apart, packed, timed_run

TRACED = 2  # steps in a trace
TIMED = slice(3, 8)  # steps before the trace
ITEM_SIZE = {"Byte": 1, "BFloat16": 2, "Half": 2, "Float": 4, "Int": 4, "Long": 8, "Double": 8}
TEN_STEPS = (
    "max_seq_len=512", "packed=true", "global_batch_size=8", "micro_batch_size=1", "max_steps=10",
    "optimizer.lr=1e-3", "compute.dtype=fp32", "checkpointer.every=null",
)  # fmt: skip


def processes(bench: Bench, least: int) -> int:
    """Return the largest power of two of the number of devices, at most 8."""
    count = max(size for size in (1, 2, 4, 8) if size <= bench.devices)
    if count < least:
        raise Skipped(f"needs {least} devices")
    return count


def layout(*settings: str, recipe: str = "full_finetune", shape: str = "tiny", least: int = 2) -> Part:
    """Check that ten fp32 steps on all devices have the losses of one device."""

    def measure(bench: Bench, name: str) -> Iterable[Result]:
        inputs = f"model.path={bench.model(shape)}", f"dataset.path={bench.chats}", *TEN_STEPS
        count = processes(bench, least)
        alone = Run(bench.folder / "runs" / f"one-device-{shape}")
        if not alone.steps():
            bench.recipe(alone.folder.name, "full_finetune", *inputs, limit=100)
        run = bench.recipe(name, recipe, *inputs, *settings, limit=150, processes=count)
        yield Check(f"{name}: loss of 10 steps on {count} devices vs. one", apart(run, alone), 1e-5)
        yield Check(f"{name}: gradient norm", apart(run, alone, "grad_norm"), 1e-3)

    return Part(measure, (shape,))


def traffic(title: str, *settings: str, recipe: str = "full_finetune", shape: str = "llama-1b", least: int = 2) -> Part:
    """Measure the speed per device, and bytes and overlap from a trace."""

    def measure(bench: Bench, name: str) -> Iterable[Result]:
        count = processes(bench, least)
        data = f"dataset.path={bench.chats}", *packed(bench, 4 * count, 2)
        traced = with_trace(recipe, bench.folder / "recipes", TIMED.stop + 1, TRACED)
        in_words = f"{title}, 1B, {count} devices, 4 rows of 4,096 each"
        yield timed_run(
            bench, name, in_words, traced, shape, *data, *settings, limit=200, timed=TIMED,
            steps=TIMED.stop + TRACED + 2, processes=count,
        )  # fmt: skip
        if bench.device == "cuda":  # a CPU's trace has no kernels
            (trace,) = (bench.folder / "runs" / name / "profile").glob("*.json")
            yield exchanged(in_words, trace, TRACED)

    return Part(measure, (shape,), memory=60)


def with_trace(recipe: str, folder: Path, start: int, steps: int) -> Path:
    """Copy a recipe that traces these steps, as in docs/changes.md."""
    script = folder / f"traced_{recipe}.py"
    folder.mkdir(parents=True, exist_ok=True)
    text = (ROOT / "recipes" / f"{recipe}.py").read_text(encoding="utf-8")
    loop = "run.steps(data, checkpointer, evaluator, seed=cfg.seed)"
    traced = f'profile({loop}, run.path / "profile", world, start={start}, steps={steps})'
    for old, new in ((loop, traced), ("from tune.run import Run\n", "from tune.run import Run, profile\n")):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script.write_text(text, encoding="utf-8")
    shutil.copyfile(ROOT / "configs" / f"{recipe}.yaml", script.with_suffix(".yaml"))
    return script


def exchanged(name: str, trace: Path, steps: int) -> Traffic:
    """Of the kernels of NCCL of rank 0, in the trace of a run."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel" and event["pid"] == 0]
    exchanges = [event for event in kernels if event["name"].startswith("nccl")]
    others = merged(event for event in kernels if not event["name"].startswith("nccl"))
    intervals = merged(exchanges)
    total = sum(end - begin for begin, end in intervals)
    hidden = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in intervals
        for other_begin, other_end in others
    )
    sent = sum(bytes_sent(event["args"]) for event in exchanges)
    return Traffic(name, sent / steps / 2**30, total / steps / 1e6, hidden / total if total else 0.0)


def merged(events: Iterable[dict]) -> list[tuple[float, float]]:
    """Return the intervals in which any of the events runs, in microseconds."""
    intervals: list[tuple[float, float]] = []
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if intervals and begin <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(end, intervals[-1][1])
        else:
            intervals.append((begin, end))
    return intervals


def bytes_sent(collective: dict) -> float:
    """Return the bytes per device as in a ring: (n - 1) / n of gathered or scattered tensors, twice that for sums."""
    kind, size = collective["Collective name"], collective["Group size"]
    inputs, outputs = (collective[f"{way} msg nelems"] * ITEM_SIZE[collective["dtype"]] for way in ("In", "Out"))
    share = (size - 1) / size
    if "allreduce" in kind:
        return 2 * share * inputs
    if "allgather" in kind or "reduce_scatter" in kind or "all_to_all" in kind:
        return share * max(inputs, outputs)
    return 0.0 if "recv" in kind else inputs


PIPELINE = {"recipe": "pipeline_finetune"}
LAYOUTS = {
    "layout-fsdp": layout(),
    "layout-zero-0": layout("parallel.zero_stage=0"),
    "layout-zero-1": layout("parallel.zero_stage=1"),
    "layout-zero-2": layout("parallel.zero_stage=2"),
    "layout-hsdp": layout("parallel.dp_replicate=2", "parallel.reduce_every_micro_batch=false"),
    "layout-tp": layout("parallel.tp=2"),
    "layout-tp-whole-head": layout("parallel.tp=2", "parallel.loss_parallel=false"),
    "layout-cp": layout("parallel.cp=2"),
    "layout-ep": layout("parallel.ep=2", shape="tiny-moe"),
    "layout-pp": layout("parallel.pp=2", **PIPELINE),
    "layout-pp-interleaved": layout("parallel.pp=2", "parallel.pp_schedule=interleaved", **PIPELINE),
    "layout-pp-zero-bubble": layout("parallel.pp=2", "parallel.pp_schedule=zero_bubble", **PIPELINE),
    "layout-tp-cp": layout("parallel.tp=2", "parallel.cp=2", least=4),
    "layout-tp-pp": layout("parallel.tp=2", "parallel.pp=2", **PIPELINE, least=4),
    "layout-ep-cp": layout("parallel.ep=2", "parallel.cp=2", shape="tiny-moe", least=4),
    "traffic-fsdp": traffic("FSDP"),
    "traffic-zero-0": traffic("ZeRO 0", "parallel.zero_stage=0"),
    "traffic-tp": traffic("tp 2", "parallel.tp=2"),
    "traffic-cp": traffic("cp 2", "parallel.cp=2"),
    "traffic-pp": traffic("pp 2", "parallel.pp=2", **PIPELINE),
}

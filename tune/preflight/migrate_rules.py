"""What the tables of `peers/` cannot say in a line: keys that mean something together, and values that need a look.

A function that a table names with `by` gets one key; those of `FINISH` make settings of the steps (`_...`).
"""

import re
from collections import defaultdict
from pathlib import PurePosixPath
from typing import Any

from tune.preflight.migrate import Migration, Setting

FILES = ("json", "csv", "parquet", "text", "arrow")  # names of `datasets`' readers, not of data
TORCHTUNE_LAYERS = {"output_proj": ["o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"], "output": ["lm_head"]}


def model(run: Migration, key: str, value: str) -> None:
    """A name on the hub becomes the folder that `tune download` makes of it."""
    is_folder = value.startswith(("/", ".", "~")) or value.count("/") != 1
    note = "" if is_folder else f"tune download {value}"
    target = "teacher.path" if "teacher" in key else "model.path"
    if run.takes(target):
        run.set(target, value if is_folder else f"./{value.split('/')[1]}", key, note=note)
    else:
        run.said[key] = "no counterpart", f"{run.recipe} has no {target}"


def torchtune_model(run: Migration, key: str, value: str) -> None:
    if value.rpartition(".")[2].startswith("qlora_"):
        run.set("quantization.weights", "nf4", key)
        run.set("quantization.double", True, key)
    else:
        run.said[key] = "converted", f"tune run {run.recipe}; the architecture is that of the checkpoint's config.json"


def torchtune_layers(run: Migration, key: str, value: Any) -> None:
    """Names of torchtune's layers, and its switches for more of them, as the checkpoint's names."""
    layers = value if isinstance(value, list) else [key.rpartition("_")[2]] if value else []
    found = [name for layer in layers for name in TORCHTUNE_LAYERS.get(layer, [layer])]
    before = run.pop("_targets", [])
    run.set("_targets", [*before.value, *found], *before.sources, key)


def offload(run: Migration, key: str, value: Any) -> None:
    """DeepSpeed's and FSDP's settings: parameters, gradients and states are always sharded here."""
    text = f"{key}={value}".lower() if "offload" in key else str(value).lower()
    if "offload" in text and not text.endswith(("=false", "=none")):
        run.convert(key, True, {"to": "memory.cpu_offload"})
    elif re.search(r"zero[_-]?[0-2]|z[0-2](_|\b)|shard_grad_op|no_shard|^[0-2]$", text):
        run.said[key] = "differs", "parallel.dp_shard=auto shards the parameters too: less memory, the same training"
    elif "hybrid" in text:
        run.said[key] = "differs", "parallel.dp_replicate=NODES keeps a copy of the model in each node"
    else:
        run.said[key] = "same by default", "parallel.dp_shard=auto shards parameters, gradients and states, as ZeRO-3"


def named_datasets(run: Migration, key: str, value: Any) -> None:
    """LLaMA-Factory's names of data/dataset_info.json, as the files that these have as a rule."""
    step, folder = ("_val" if "eval" in key else "_data"), run.theirs.get("dataset_dir") or "data"
    for index, name in enumerate(value if isinstance(value, list) else re.split(r"\s*,\s*", str(value))):
        is_path = "/" in name or "." in name
        note = "" if is_path else f"dataset_info.json says where '{name}' is: check the path"
        run.set(f"{step}[{index}].path", name if is_path else f"{folder}/{name}.json", key, note=note)


def data_file(run: Migration, key: str, value: str) -> None:
    if str(value).endswith((".yaml", ".yml")):
        run.said[key] = "no counterpart", f"{value} lists the data: give what it names as dataset.path"
    else:
        run.set(f"{'_val' if 'eval' in key else '_data'}[0].path", value, key)


def targets(run: Migration, key: str, value: Any) -> None:
    """Layers as a list, as `a,b`, as `all`, or as a pattern."""
    if isinstance(value, str) and "," in value:
        value = re.split(r"\s*,\s*", value)
    value = "all-linear" if value in ("all", "all-linear", ["all"], ["all-linear"]) else value
    if isinstance(value, str) and re.fullmatch(r"\w+", value):
        value = [value]
    run.set("_targets", value, key)


def listed(run: Migration, key: str, value: Any) -> None:
    run.set("adapter.modules_to_save", value if isinstance(value, list) else re.split(r"\s*,\s*", value), key)


def kd_ratio(run: Migration, key: str, value: float) -> None:
    """The share of the divergence there, that of the labels' cross-entropy here."""
    run.set("loss.cross_entropy", round(1 - value, 6), key)


def beta(run: Migration, key: str, value: float) -> None:
    """The weight of the KL divergence; of GKD the place between the forward KL (0) and the reverse one (1)."""
    if run.recipe != "distill":
        run.convert(key, value, {"to": ["kl", "loss.beta"]})
        return
    name = "ForwardKL" if value == 0 else "ReverseKL" if value == 1 else "JensenShannon"
    run.set("loss._component_", f"tune.losses.{name}", key)
    if name == "JensenShannon":
        run.set("loss.beta", value, key)


def batch(run: Migration) -> None:
    """Theirs per device, times accumulation, times devices: ours is that of an optimizer step over all devices."""
    micro, steps, full = run.pop("_micro", 1), run.pop("_accumulation", 1), run.pop("_global")
    per_device = micro.value * steps.value * run.world_size
    product = f"{micro.value} a device x {steps.value} accumulated x {run.world_size} devices (--world-size)"
    sources = [*micro.sources, *steps.sources]
    if run.takes("prompts_per_step") and "prompts_per_step" not in run.settings:
        group = run.settings.get("group_size", run.settings.get("samples_per_prompt", Setting(1, []))).value
        note = f"{product} are completions there; {group} of each prompt"
        run.set("prompts_per_step", max(1, per_device // group), *sources, note=note)
    elif "prompts_per_step" in run.settings:
        run.settings["prompts_per_step"].value *= run.world_size
        for key in sources:
            run.said[key] = "same by default", "gradients accumulate until the step is complete"
    elif run.takes("global_batch_size"):
        note = "" if full.value else product
        run.set("global_batch_size", full.value or per_device, *sources, *full.sources, note=note)
    if micro.sources and run.takes("micro_batch_size"):
        run.set("micro_batch_size", micro.value, *micro.sources)


def precision(run: Migration) -> None:
    bf16, fp16, weights = run.pop("_bf16"), run.pop("_fp16"), run.pop("_weights")
    wanted = [str(each.value).lower() for each in (bf16, fp16, weights)]
    is_bf16 = wanted[0] in ("true", "auto", "full") or ("bf" in wanted[2] and bf16.value is None)
    is_fp16 = wanted[1] == "true" or wanted[2] in ("fp16", "float16")
    if not is_bf16 and not is_fp16 and not any((bf16.value is not None, weights.value is not None)):
        return
    note = "fp16 overflows at 65,504 and needs a loss scale: bf16 does not" if is_fp16 and not is_bf16 else ""
    used = [*bf16.sources, *fp16.sources, *(weights.sources if bf16.value is None else [])]
    run.set("dtype", "bf16" if is_bf16 or is_fp16 else "fp32", *used, note=note)
    keeps_bf16 = "bf" in wanted[2] or wanted[2] == "true" or (run.peer == "axolotl" and is_bf16)
    if keeps_bf16 and not run.has_adapter and run.takes("master_dtype"):
        note = "as there: updates below 1/256 of a weight are lost; master_dtype=fp32 keeps them, for more memory"
        run.set("master_dtype", "bf16", *(weights.sources or bf16.sources), note=note)
    for key in weights.sources:
        if not any(key in each.sources for each in run.settings.values()):
            run.said[key] = "same by default", ""


def schedule(run: Migration) -> None:
    if not run.takes("schedule.warmup"):
        return
    steps, ratio = run.pop("_warmup_steps"), run.pop("_warmup_ratio")
    kind = run.settings.get("schedule._component_")
    if steps.value or ratio.value is not None:
        value, sources = (steps.value, steps.sources) if steps.value else (ratio.value, ratio.sources)
        run.set("schedule.warmup", value, *sources)
    else:
        run.set("schedule.warmup", 0, *steps.sources, *ratio.sources)
    lowest = run.pop("_min_lr")
    floor, rate = run.pop("_min_ratio", 0.0), run.settings.get("optimizer.lr")
    if lowest.value is not None and rate and rate.value:
        floor = Setting(lowest.value / rate.value, lowest.sources)
    if kind and kind.value.endswith(("cosine", "linear", "warmup_stable_decay")):
        run.set("schedule.min_ratio", floor.value or 0.0, *kind.sources, *floor.sources)
    if kind and kind.value.endswith("constant"):
        run.pop("_min_ratio")


def betas(run: Migration) -> None:
    first, second, name = run.pop("_beta1", 0.9), run.pop("_beta2", 0.999), run.settings.get("optimizer._component_")
    if name is None or "Adam" in name.value:
        run.set("optimizer.betas", [first.value, second.value], *first.sources, *second.sources)
    else:
        run.settings.pop("optimizer.eps", None)


def layers(run: Migration) -> None:
    """The layers that get an adapter."""
    named, linear = run.pop("_targets"), run.pop("_target_linear")
    if not run.has_adapter:
        for source in (*named.sources, *linear.sources):
            run.said[source] = "same by default", "no adapter is trained"
        return
    if linear.value is False:
        run.said.update(dict.fromkeys(linear.sources, ("same by default", "off there too")))
    if linear.value:
        note = "all-linear includes them" if named.value and linear.value else ""
        run.set("adapter.target_modules", "all-linear", *linear.sources, *named.sources, note=note)
    elif named.value:
        run.set("adapter.target_modules", named.value, *named.sources)
    else:
        note = "PEFT chooses by the architecture: q_proj and v_proj of a Llama"
        run.set("adapter.target_modules", ["q_proj", "v_proj"], *linear.sources, note=note)
    rank = run.settings.get("adapter.rank")
    if "adapter.alpha" not in run.settings and rank:  # LLaMA-Factory's rule
        run.set("adapter.alpha", 2 * rank.value, *rank.sources)


def data(run: Migration) -> None:
    """One source becomes `dataset`, several a mixture; a slice of a split becomes what there is for it."""
    learned, take = run.pop("_train_on"), run.pop("_take")
    if learned.value and run.takes("dataset.train_on"):
        run.set("dataset.train_on", learned.value, *learned.sources)
    sources, held_out = _items(run, "_data"), _items(run, "_val")
    if len(sources) == 1 and held_out and _is_rest(sources[0], held_out[0]):
        done, rest = sources[0].pop("split"), held_out[0].pop("split")
        fraction = round(1 - int(re.findall(r"\d+", done.value)[-1]) / 100, 4)
        used = [*done.sources, *rest.sources, *(name for each in held_out[0].values() for name in each.sources)]
        run.set("dataset.validation_fraction", fraction, *used, note="rows are held out by their content")
        held_out = []
    for each in (*sources, *held_out[:1]):
        _settle(each)
    if take.value:
        for each in sources:
            each["take"] = Setting(take.value, take.sources, ["the first rows"])
    for each in held_out[:1]:
        for name, setting in each.items():
            _put(run, f"validation_dataset.{name}", setting)
    for each in held_out[1:]:
        for setting in each.values():
            for key in setting.sources:
                run.said[key] = "no counterpart", "there is one validation_dataset; tune.datasets.mix has several"
    if len(sources) == 1:
        for name, setting in sources[0].items():
            _put(run, f"dataset.{name}", setting)
    elif sources and not run.takes("dataset.train_on") and "prompts_per_step" in run.defaults:
        for each in sources:
            for setting in each.values():
                for key in setting.sources:
                    run.said[key] = "no counterpart", f"{run.recipe} reads one set of prompts: join the files"
    elif sources:
        _mix(run, sources)


def _mix(run: Migration, sources: list[dict[str, Setting]]) -> None:
    shared = {key[8:]: run.settings.pop(key) for key in [*run.settings] if key.startswith("dataset.")}
    parts: dict[str, dict[str, Any]] = {}
    for index, each in enumerate(sources):
        name = re.sub(r"\W+", "_", PurePosixPath(str(each["path"].value if "path" in each else "source")).stem)
        name = f"{name}_{index}" if name in parts else name
        parts[name] = {key: setting.value for key, setting in (each | shared).items()}
    every = [*shared.values(), *(setting for each in sources for setting in each.values())]
    used = list(dict.fromkeys(key for each in every for key in each.sources))
    notes = list(dict.fromkeys(note for each in every for note in each.notes))
    run.settings["dataset._component_"] = Setting("tune.datasets.mix", used)
    run.settings["dataset.sources"] = Setting(parts, used, notes)


def _items(run: Migration, step: str) -> list[dict[str, Setting]]:
    """The steps `_data[0].path`, one dict for each index."""
    found: dict[int, dict[str, Setting]] = defaultdict(dict)
    for key in [key for key in run.settings if key.startswith(f"{step}[")]:
        index, _, name = key.removeprefix(f"{step}[").partition("].")
        found[int(index)][name] = run.pop(key)
    return [found[index] for index in sorted(found)]


def _is_rest(first: dict[str, Setting], second: dict[str, Setting]) -> bool:
    """Whether the second is what the first leaves of a split: `train[:95%]` and `train[95%:]`."""
    splits = [re.sub(r"\s", "", str(each["split"].value)) for each in (first, second) if "split" in each]
    return re.fullmatch(r"(\w+)\[:(\d+%)\] \1\[\2:\]", " ".join(splits)) is not None


def _settle(source: dict[str, Setting]) -> None:
    split, files, path = source.get("split"), source.pop("data_files", None), source.get("path")
    if split and (cut := re.fullmatch(r"(\w+)\[:(\d+)(%?)\]", re.sub(r"\s", "", str(split.value)))):
        split.value = cut[1]
        if cut[3]:
            split.notes.append(f"the first {cut[2]}% there, all rows here: dataset.take is a number of rows")
        else:
            source["take"] = Setting(int(cut[2]), split.sources)
    elif split and "[" in str(split.value):
        split.notes.append(f"{split.value}: slices are not read, all rows are")
        split.value = str(split.value).partition("[")[0]
    if files and (path is None or path.value in FILES):
        several = isinstance(files.value, list) and len(files.value) > 1
        notes = ["the first of its files: a folder or a glob names several"] if several else []
        chosen = files.value[0] if isinstance(files.value, list) else files.value
        source["path"] = Setting(chosen, [*files.sources, *(path.sources if path else [])], notes)
    elif files and path:
        path.notes.append(f"its data_files {files.value} are not chosen: dataset.path can be their folder or glob")
        path.sources.extend(files.sources)
    columns = {key[8:]: source.pop(key) for key in [*source] if key.startswith("columns.")}
    if columns:
        known = source.get("columns", Setting({}, []))
        used = [*known.sources, *(name for each in columns.values() for name in each.sources)]
        source["columns"] = Setting(known.value | {key: each.value for key, each in columns.items()}, used)


def _put(run: Migration, key: str, setting: Setting) -> None:
    if run.takes(key):
        run.set(key, setting.value, *setting.sources)
        run.settings[key].notes += setting.notes
    else:
        for source in setting.sources:
            run.said[source] = "no counterpart", f"{run.recipe} has no {key}"


FINISH = (batch, precision, schedule, betas, layers, data)

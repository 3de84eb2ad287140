"""Settings that depend on several keys of a peer. Each function builds its settings from `Migration.parts`.

`migrate` calls the functions in order after it has read all keys.
"""

import math
import re
from collections import defaultdict
from pathlib import PurePosixPath
from typing import Any

from tune.config import signature_of
from tune.migrate.leaves import text_of
from tune.migrate.migration import Migration, Setting

READERS = ("json", "csv", "parquet", "text", "arrow")  # formats of the `datasets` library, not names of datasets
TEXTS = [f"torchtune.datasets.{name}_dataset" for name in ("text_completion", "wikitext", "cnn_dailymail_articles")]
COMPARE = ("preference_finetune", "reward_finetune")
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
ROUNDED = (
    "as in the original, updates below 1/256 of a weight are lost; compute.master_dtype=fp32 keeps them, but needs "
    "memory"
)

Arguments = dict[str, Setting]  # the arguments of tune.datasets.load for one source


def batch(run: Migration) -> None:
    """Set the global batch: the batch per device x accumulation steps x data-parallel devices."""
    micro, steps, whole = run.part("micro_batch_size", 1), run.part("accumulation", 1), run.part("global_batch_size")
    sizes = {axis: run.settings.get(f"parallel.{axis}", Setting(1, [])).value for axis in AXES}
    sizes = {axis: size if isinstance(size, int) and size > 0 else 1 for axis, size in sizes.items()}
    same = sizes["cp"] * sizes["tp"] * sizes["pp"]  # devices that read the same rows
    devices = max(run.world_size, math.prod(sizes.values())) // same
    rows = micro.value * steps.value * devices
    of_devices = f" groups of {same}" if same > 1 else ""
    note = f"{micro.value} per device x {steps.value} accumulated x {devices}{of_devices} devices (--world-size)"
    used = [*micro.sources, *steps.sources]
    last = run.settings.get("max_steps")
    if "prompts_per_step" in run.settings:  # torchtune: batch_size counts prompts; PPO's num_steps counts completions
        if run.recipe == "ppo_finetune" and last:
            last.value //= run.settings["prompts_per_step"].value
            last.notes.append("the original counts completions, tune counts steps")
        run.settings["prompts_per_step"].value *= devices
        run.same("gradients accumulate until the step is complete", *used)
    elif run.takes("prompts_per_step"):
        group = run.settings.get("group_size", Setting(1, [])).value
        prompts = max(1, rows // group)
        note = f"{note}: the original counts completions, {group} per prompt"
        run.set("prompts_per_step", prompts, *used, note=note)
        if last and "total_episodes" in last.sources:
            last.value = max(1, last.value // prompts)
            last.notes.append("the original counts completions, tune counts steps")
    elif run.takes("global_batch_size"):
        note = "" if whole.value else note
        run.set("global_batch_size", whole.value or rows, *used, *whole.sources, note=note)
    if micro.sources and run.takes("micro_batch_size"):
        run.set("micro_batch_size", micro.value, *micro.sources)


def passes(run: Migration) -> None:
    """Let max_steps alone end the run, as transformers' Trainer does: it repeats the data."""
    last, streams = run.settings.get("max_steps"), run.settings.get("dataset.streaming")
    if run.peer == "torchtune" or run.recipe == "ppo_finetune" or not last or last.value <= 0:
        return
    if run.takes("epochs") and not (streams and streams.value):
        run.set("epochs", 1_000_000, *last.sources)


def precision(run: Migration) -> None:
    """Set the compute dtype, and master_dtype if the config states it or (axolotl) ties it to the compute dtype."""
    bf16, fp16, weights = run.part("bf16"), run.part("fp16"), run.part("dtype_of_weights")
    words = {name: str(part.value).lower() for name, part in (("bf16", bf16), ("fp16", fp16), ("weights", weights))}
    computed = bf16 if bf16.value is not None else weights
    dtype = "compute.dtype" if run.takes("compute.dtype") else "dtype"
    is_bf16 = words["bf16"] in ("true", "auto", "full") or (computed is weights and "bf" in words["weights"])
    is_fp16 = words["fp16"] == "true" or (not is_bf16 and words["weights"] in ("fp16", "float16"))
    is_off = not (is_bf16 or is_fp16 or weights.sources)
    if run.peer == "llama_factory" and run.has_adapter and is_off and not run.theirs.get("use_cpu"):
        why = "LLaMA-Factory computes a frozen base in the dtype of its checkpoint, usually bf16"
        run.same(why, *bf16.sources, *fp16.sources)
    elif is_fp16:
        note = "with a loss scale; bf16 needs none, if the GPU supports it"
        run.set(dtype, "fp16", *computed.sources, *fp16.sources, note=note)
    elif computed.value is not None:
        run.set(dtype, "bf16" if is_bf16 else "fp32", *computed.sources, *fp16.sources)
    in_bf16 = "bf" in words["weights"] or (run.peer == "axolotl" and is_bf16)
    if in_bf16 and not run.has_adapter and run.takes("compute.master_dtype"):
        run.set("compute.master_dtype", "bf16", *(weights.sources or bf16.sources), note=ROUNDED)
    elif computed is not weights:
        run.same("trained parameters are kept in fp32", *weights.sources)


def optimizer(run: Migration) -> None:
    """Set Adam's betas, which most peers split into two keys."""
    first, second, name = run.part("beta1", 0.9), run.part("beta2", 0.999), run.settings.get("optimizer._component_")
    if not run.takes("optimizer.betas"):
        return
    if name is None or "Adam" in name.value:
        if "optimizer.betas" not in run.settings:  # torchtune has one key for both
            run.set("optimizer.betas", [first.value, second.value], *first.sources, *second.sources)
        return
    used = [*first.sources, *second.sources, *run.pop("optimizer.betas").sources]
    # adam_epsilon is for Adam only; torchtune's eps is an argument of whichever optimizer is named.
    if run.peer != "torchtune" or "eps" not in signature_of(name.value).parameters:
        used += run.pop("optimizer.eps").sources
    run.missing(f"{name.value} has no such argument", *used)


def schedule(run: Migration) -> None:
    """Set the warm-up, from a number of steps or a ratio, and the lowest learning rate."""
    steps, ratio, floor, lowest = map(run.part, ("warmup_steps", "warmup_ratio", "min_ratio", "min_lr"))
    kind, rate = run.settings.get("schedule._component_"), run.settings.get("optimizer.lr")
    if run.peer == "axolotl" and steps.sources:  # axolotl: warmup_steps, even 0, overrides warmup_ratio
        ratio = Setting(None, ratio.sources)
    if kind is None or not run.takes("schedule.warmup"):
        return
    name = text_of({**run.usual, **run.theirs}, *kind.sources)
    used = steps.sources if steps.value or ratio.value is None else ratio.sources
    warmup = steps.value or ratio.value or 0
    if name.lower() == "constant" and warmup:  # constant_with_warmup has one
        run.same("the schedule constant has no warm-up", *used)
        used, warmup = kind.sources, 0
    note = "the original's first step has a learning rate of 0" if warmup else ""
    last = run.settings.get("max_steps")
    if 0 < warmup < 1 and last and last.value:
        warmup = _warmup_steps(run, warmup, last.value)
    elif 0 < warmup < 1:
        rounding = "down (1 becomes 2)" if run.peer == "axolotl" else "up"
        note += f", and the original rounds {rounding} the number of warm-up steps"
        if run.peer == "axolotl" and "warmup_ratio" not in run.theirs:
            note += ", at most 100"
    if run.peer == "axolotl" and warmup == 1:  # it makes 2 of 1
        warmup = 2
    if last and last.value and warmup > max(1, last.value):
        note = f"in the original, max_steps={last.value} ends the run before the learning rate reaches its peak"
        warmup = last.value
    run.set("schedule.warmup", warmup, *used, note=note)
    if note:
        run.differs(note, *(key for key in used if key not in run.theirs))
    if kind.value.endswith("square_root") and not warmup:
        run.differs("without a warm-up, the original's time scale is 10,000 steps, and tune's is 1", *kind.sources)
    if run.peer == "axolotl" and "cosine_min_lr_ratio" in floor.sources and name.lower() != "cosine":
        run.same(f"the schedule {name} does not read it", "cosine_min_lr_ratio")
        floor = Setting(None, [])
    if not kind.value.endswith(("constant", "square_root")):
        least = round(lowest.value / rate.value, 6) if lowest.value and rate else floor.value or 0.0
        run.set("schedule.min_ratio", least, *kind.sources, *floor.sources, *lowest.sources)


def _warmup_steps(run: Migration, ratio: float, last: int) -> int:
    """The number of warm-up steps in a run of `last` steps. transformers rounds up, axolotl down."""
    if run.peer != "axolotl":
        return math.ceil(ratio * last)
    steps = int(ratio * last)
    return steps if "warmup_ratio" in run.theirs else min(steps, 100)


def adapter(run: Migration) -> None:
    """Set the adapter's layers, scale and dropout, and the quantization of the base."""
    target_modules(run)
    rank = run.settings.get("adapter.rank")
    if "adapter.alpha" not in run.settings and rank:  # LLaMA-Factory's default
        run.set("adapter.alpha", 2 * rank.value, *rank.sources)
    dropout = run.settings.get("adapter.dropout")
    if dropout and dropout.value and run.library.has_no_dropout(run.usual | run.theirs, run.method):
        run.set("adapter.dropout", 0.0, note="the original trainer disables all dropout, including adapter dropout")
    quantized = [run.settings.get(key) for key in ("model.quantization", "quantization")]
    if not any(setting and setting.value for setting in quantized):
        run.same("no weights are quantized", *run.pop("model.double_quantization").sources)
    if "adapter.path" in run.settings:
        continued_adapter(run)


def target_modules(run: Migration) -> None:
    named, linear = run.part("target_modules"), run.part("target_linear")
    if not run.has_adapter:
        run.same("no adapter is trained", *named.sources, *linear.sources)
        return
    if linear.value is False:
        run.same("also off in the original", *linear.sources)
    if linear.value:
        note = "all-linear includes the named layers" if named.value else ""
        run.set("adapter.target_modules", "all-linear", *linear.sources, *named.sources, note=note)
    else:
        run.set("adapter.target_modules", named.value or ["q_proj", "v_proj"], *named.sources)  # PEFT's Llama default


def continued_adapter(run: Migration) -> None:
    """Drop settings that adapter.path determines. LLaMA-Factory's reference is the base without the adapter."""
    for key in [*run.settings]:
        if key.startswith("adapter.") and not key.startswith(("adapter.path", "adapter.dropout")):
            run.same("read from the adapter in adapter.path", *run.pop(key).sources)
    compares = run.method == "dpo" and run.theirs.get("pref_loss") not in ("orpo", "simpo")
    if run.peer == "llama_factory" and compares:
        base, path = run.settings["model.path"].value, run.settings["adapter.path"].sources[0]
        note = "LLaMA-Factory's reference is the base without the adapter"
        run.put(path, base, "reference", note=note, gives_way=True)


def length(run: Migration) -> None:
    """Double max_seq_len for pairs: it limits both answers together, the peers' limits each answer with its prompt."""
    limit = run.settings.get("max_seq_len")
    is_labelled = run.settings.get("dataset.kind", Setting("", [])).value == "labelled"  # KTO: one answer per row
    if run.recipe not in COMPARE or is_labelled or limit is None or not isinstance(limit.value, int):
        return
    note = f"max_seq_len limits both answers together, each with its prompt; {run.library.name} limits each one"
    limit.value *= 2
    limit.notes.append(note)
    run.differs(f"{note}: max_seq_len={limit.value}", *(key for key in limit.sources if key not in run.theirs))


def preferences(run: Migration) -> None:
    """Set SimPO's margin and CPO's NLL term for the chosen answer, which TRL also adds to SimPO's loss."""
    gamma, nll = run.part("gamma"), run.part("nll")
    loss = str(run.settings.get("loss._component_", Setting("", [])).value)
    if loss.endswith("SimPO"):
        if gamma.value is not None:
            run.set("loss.gamma", gamma.value, *gamma.sources)
        if nll.value:
            run.missing("tune's SimPO has no NLL term for the chosen answer", *nll.sources)
        else:
            run.same("also off in the original", *nll.sources)
        return
    run.same("only SimPO has a margin", *gamma.sources)
    if nll.value is not None and loss.endswith("CPO"):
        run.set("loss.nll", nll.value, *nll.sources)
    else:
        run.same("only CPO uses it", *nll.sources)


def data(run: Migration) -> None:
    """Set `dataset`: one source or a mixture of several, with their validation data; translate slices of splits."""
    what_is_learned(run)
    sources = sources_of(run, "data")
    held_out = held_out_of(run, sources)
    take, way, shares = run.part("take"), run.part("mix_strategy"), run.part("mix_weights")
    if sources and held_out and is_rest(sources[0], held_out[0]):
        fraction_held_out(run, sources[0], held_out[0])
        held_out = []
    for source in (*sources, *held_out):
        settle(source)
        rename_prompts(run, source)
    for source in sources if take.value else []:
        source["take"] = Setting(take.value, take.sources, ["takes the first rows"])
    left_out = validation(run, sources, held_out)
    epoch_ends = {"interleave_over": "all_exhausted", "interleave_under": "first_exhausted"}.get(str(way.value))
    asks = "prompts_per_step" in run.defaults
    if len(sources) == 1:
        set_arguments(run, sources[0])
    elif sources and not asks:
        if epoch_ends:
            weights = re.findall(r"[\d.]+", str(shares.value)) or [1] * len(sources)  # without weights: equal shares
            for source, weight in zip(sources, weights, strict=False):
                source["weight"] = Setting(float(weight), shares.sources)
        mix(run, sources)
        if epoch_ends:
            run.set("dataset.epoch_ends", epoch_ends, *way.sources)
    if len(sources) < 2 or not epoch_ends:
        run.same("", *way.sources, *shares.sources)
    stream(run)
    for source in sources if len(sources) > 1 and asks else []:
        left_out += source.values()
    for setting in left_out:
        run.missing("the recipe reads one dataset: join the files", *setting.sources)


def validation(run: Migration, sources: list[Arguments], held_out: list[Arguments]) -> list[Setting]:
    """Give each of the `held_out` data to one of the training `sources`: to that with the same path, or the next one.

    Returns the arguments of data that no source is left for. Without any, drops the clock of the validation.
    """
    places, left_out = [*sources] or [Arguments()], list[Setting]()
    if "prompts_per_step" in run.defaults:
        places = places[:1]  # all that a recipe of prompts reads
    fraction, every = run.settings.get("dataset.validation_fraction"), run.settings.get("evaluate.every")
    if not run.takes("evaluate.every"):
        places = []  # the recipe does not train
    for rows in held_out:
        same = [place for place in places if "path" in place and differing(run, place, rows).keys() & {"path"} == set()]
        place = next(iter(same or places), None)
        if place is None:
            left_out += rows.values()
            continue
        places = [each for each in places if each is not place]
        arguments = accepted(run, differing(run, place, rows))
        value: Any = {name: setting.value for name, setting in arguments.items()}
        used = list(dict.fromkeys(key for setting in rows.values() for key in setting.sources))
        notes = list(dict.fromkeys(note for setting in rows.values() for note in setting.notes))
        value = value["path"] if value.keys() == {"path"} else value
        place["validation"] = Setting(value, [key for key in used if key not in run.said], notes)
        if not sources:
            set_arguments(run, place)
    if fraction and fraction.value and len(left_out) < len(held_out):
        run.refuse("dataset.validation_fraction", "other keys name the validation data")
    elif every and every.value and not held_out and not (fraction and fraction.value):
        run.refuse("evaluate.every", "the run has no validation data: set dataset.validation")
    return left_out


def differing(run: Migration, training: Arguments, rows: Arguments) -> Arguments:
    """Return the arguments of validation `rows` that differ from those of the `training` data, which they inherit."""
    shared = {key.removeprefix("dataset."): each for key, each in run.settings.items() if key.startswith("dataset.")}
    known = shared | training
    if "path" in rows and (known.get("path", Setting(None, [])).value != rows["path"].value):
        usual = {"split": "train", "subset": None}
        rows = {name: Setting(value, []) for name, value in usual.items() if name in known} | rows
    return {name: each for name, each in rows.items() if name not in known or known[name].value != each.value}


def what_is_learned(run: Migration) -> None:
    """Set which tokens of a row are supervised, the chat template, and the handling of long texts."""
    learned = run.part("train_on")
    if learned.value is not None and run.takes("dataset.train_on"):
        run.set("dataset.train_on", learned.value, *learned.sources, note="; ".join(learned.notes))
    template = run.settings.get("tokenizer.chat_template")
    chats = [key for key, value in run.theirs.items() if key.endswith("].type") and value == "chat_template"]
    if template and chats and all(key.endswith("].type") for key in template.sources):
        run.refuse("tokenizer.chat_template", f"with {chats[0]}=chat_template, all rows use the checkpoint's template")
    if run.peer == "torchtune" and "max_seq_len" in run.settings and run.takes("dataset.too_long"):
        builders = [key for key, value in run.theirs.items() if key.endswith("_component_") and value in TEXTS]
        if builders:
            run.set("dataset.too_long", "truncate", *builders, *run.settings["max_seq_len"].sources)


def held_out_of(run: Migration, sources: list[Arguments]) -> list[Arguments]:
    """Return the validation sources. TRL's scripts validate on a split of the training dataset, if at all."""
    held_out = sources_of(run, "validation")
    if "dataset_name" not in run.theirs:
        return held_out
    split = held_out[0]["split"] if held_out else Setting("test", ["eval_strategy"])
    if run.theirs.get("eval_strategy") in (None, False, "no"):
        run.same("also off in the original", *split.sources)
        return []
    return [sources[0] | {"split": split}]


def stream(run: Migration) -> None:
    """Drop `epochs` for streamed data, and the shuffle buffer for all other data."""
    streams = run.settings.get("dataset.streaming")  # absent for a mixture
    if not (streams and streams.value):
        used = run.pop("dataset.shuffle_buffer").sources
        run.same("all rows are shuffled, since they are not streamed", *used)
    elif "epochs" in run.settings:
        run.refuse("epochs", "a stream is read until max_steps is reached")


def rename_prompts(run: Migration, source: Arguments) -> None:
    """Rename the column to `prompt` if the recipe reads prompts: texts to sample from, or messages before a pair."""
    asks = "messages" if run.recipe in COMPARE else None
    if "prompts_per_step" in run.defaults:
        asks = "text"
    if "columns" not in source or asks not in source["columns"].value:
        return
    columns = {"prompt" if ours == asks else ours: theirs for ours, theirs in source["columns"].value.items()}
    source["columns"].value = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if not source["columns"].value:
        run.same("", *source.pop("columns").sources)


def fraction_held_out(run: Migration, source: Arguments, rest: Arguments) -> None:
    split = source.pop("split")
    used = [*split.sources, *(key for setting in rest.values() for key in setting.sources)]
    share = round(1 - int(re.findall(r"\d+", split.value)[-1]) / 100, 4)
    run.set("dataset.validation_fraction", share, *used, note="tune picks the rows by a hash of their content")


def mix(run: Migration, sources: list[Arguments]) -> None:
    """Build a mixture; settings of `dataset` are copied into each source."""
    for key in {"dataset.streaming", "dataset.shuffle_buffer"} & run.settings.keys():
        run.refuse(key, "in a mixture, each source has its own streaming=true, and a weight")
    shared = {key[8:]: run.settings.pop(key) for key in [*run.settings] if key.startswith("dataset.")}
    parts: dict[str, dict[str, Any]] = {}
    for index, source in enumerate(sources):
        path = str(source["path"].value) if "path" in source else "source"
        name = re.sub(r"\W+", "_", PurePosixPath(path).stem)
        name = f"{name}_{index}" if name in parts else name
        parts[name] = {key: setting.value for key, setting in (source | shared).items()}
    settings = [*shared.values(), *(setting for source in sources for setting in source.values())]
    used = list(dict.fromkeys(key for setting in settings for key in setting.sources))
    notes = list(dict.fromkeys(note for setting in settings for note in setting.notes))
    run.settings["dataset._component_"] = Setting("tune.datasets.mix", used)
    run.settings["dataset.sources"] = Setting(parts, used, notes)


def sources_of(run: Migration, name: str) -> list[Arguments]:
    """Collect parts such as `data[0].path` into one dict per index."""
    sources: dict[int, Arguments] = defaultdict(dict)
    for key in [key for key in run.parts if key.startswith(f"{name}[")]:
        index, _, argument = key.removeprefix(f"{name}[").partition("].")
        sources[int(index)][argument] = run.part(key)
    return [sources[index] for index in sorted(sources)]


def is_rest(one: Arguments, other: Arguments) -> bool:
    """Whether `other` is the remainder of the split that `one` takes: `train[:95%]` and `train[95%:]`."""
    splits = [re.sub(r"\s", "", str(source["split"].value)) for source in (one, other) if "split" in source]
    return re.fullmatch(r"(\w+)\[:(\d+%)\] \1\[\2:\]", " ".join(splits)) is not None


def settle(source: Arguments) -> None:
    """Turn slices of splits, files and column names into arguments of `tune.datasets.load`."""
    split, files, path = source.get("split"), source.pop("data_files", None), source.get("path")
    if split and (cut := re.fullmatch(r"(\w+)\[(:(\d+))?.*\]", re.sub(r"\s", "", str(split.value)))):
        if cut[3] and cut[0] == f"{cut[1]}[:{cut[3]}]":
            source["take"] = Setting(int(cut[3]), split.sources)
        else:
            split.notes.append(f"tune reads all rows, not {split.value}; dataset.take sets a number of rows")
        split.value = cut[1]
    if files and path and path.value not in READERS:
        path.notes.append(f"data_files {files.value} not applied: set dataset.path to their folder or glob")
        path.sources.extend(files.sources)
    elif files:
        chosen = files.value if isinstance(files.value, list) else [files.value]
        notes = ["only the first file; use a folder or a glob for several"] if len(chosen) > 1 else []
        source["path"] = Setting(chosen[0], [*files.sources, *(path.sources if path else [])], notes)
    columns = {key[8:]: source.pop(key) for key in [*source] if key.startswith("columns.")}
    if columns:
        known = source.get("columns", Setting({}, []))
        used = [*known.sources, *(key for column in columns.values() for key in column.sources)]
        source["columns"] = Setting(known.value | {key: column.value for key, column in columns.items()}, used)


def set_arguments(run: Migration, source: Arguments) -> None:
    for name, setting in accepted(run, source).items():
        run.set(f"dataset.{name}", setting.value, *setting.sources, note="; ".join(setting.notes))


def accepted(run: Migration, source: Arguments) -> Arguments:
    """Return the arguments that the recipe's dataset takes, and report the others."""
    taken: Arguments = {}
    for name, setting in source.items():
        if run.takes(f"dataset.{name}"):
            taken[name] = setting
        elif (name, setting.value) == ("train_on", "assistant"):
            run.same("only answers are supervised", *setting.sources)
        else:
            run.missing(f"{run.recipe} has no dataset.{name}", *setting.sources)
    return taken


# The trackers, with the argument that names their project.
TRACKERS = {"TensorBoard": None, "WeightsAndBiases": "project", "MLflow": "experiment", "Trackio": "project"}


def trackers(run: Migration) -> None:
    """Set the list of trackers, and among them a console that prints fewer steps."""
    every, run_name = run.part("console_every", 1), run.part("run_name")
    made, used = list[Any](), list[str]()
    for name, argument in TRACKERS.items():
        project = run.part(f"trackers.{name}")
        path = f"tune.loggers.{name}"
        if not project.value or not run.takes("trackers"):
            run.missing(f"{run.recipe} has no trackers", *(project.sources if project.value else ()))
            run.same("also off in the original", *(() if project.value else project.sources))
            continue
        arguments = {argument: project.value} if argument else {}
        used += project.sources
        if argument and run_name.value:
            arguments["name"] = run_name.value
            used += run_name.sources
        made.append({"_component_": path, **arguments} if arguments else path)
    if run_name.value and not set(run_name.sources) & {*used}:
        run.missing("no tracker of the run has names of runs; output_dir names the folder", *run_name.sources)
    if every.value == 1:
        run.same("every step is printed", *every.sources)
    elif not isinstance(every.value, int) or every.value < 1 or not run.takes("trackers"):
        run.missing("every step is printed: a tune.loggers.Console in trackers prints every Nth", *every.sources)
    else:
        made.append({"_component_": "tune.loggers.Console", "every": every.value})
        used += every.sources
        run.differs("metrics.jsonl records every step", *every.sources)
    if made:
        run.set("trackers", made, *used)

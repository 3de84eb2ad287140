"""What the tables of `peers/` cannot say in a line: keys that mean something together, and values that need a look.

A function that a table names with `by` gets one key; those of `FINISH` make settings of the steps (`_...`).
"""

import math
import re
from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import Any

from tune.config import signature_of
from tune.migrate.migration import Migration, Setting, holds, table

FILES = ("json", "csv", "parquet", "text", "arrow")  # names of `datasets`' readers, not of data
LAYERS = {"output_proj": ["o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"], "output": ["lm_head"]}  # torchtune's
TEXTS = r"_component_=torchtune\.datasets\.(text_completion|wikitext|cnn_dailymail_articles)_dataset"
COMPARE = ("preference_finetune", "reward_finetune")
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
BREAKS = "LLaMA-Factory puts one line break between an instruction and its input, tune two"
ROUNDED = "as there: updates below 1/256 of a weight are lost; master_dtype=fp32 keeps them, for more memory"

Arguments = dict[str, Setting]  # of rows: the arguments of tune.datasets.load


def model(run: Migration, key: str, value: str) -> None:
    if "teacher" in key:
        target = "teacher.path"
    else:
        target = "reference" if key == "ref_model" else "model.path"
    run.put(key, *_folder(value, target))


def reward_model(run: Migration, key: str, value: str) -> None:
    """Of TRL's PPO the value model starts from it too."""
    folder, target, note = _folder(value, "reward")
    if run.peer == "llama_factory" and run.theirs.get("reward_model_type", "lora") != "full":
        note = "an adapter there: tune merge makes a model of it"
    run.put(key, {"_component_": "tune.generation.RewardModel", "path": folder}, target, note)
    if run.peer == "trl" and run.recipe == "ppo_finetune":
        run.put(key, folder, ["value.path"])


def _folder(value: str, target: str) -> tuple[str, list[str], str]:
    """Of a name on the hub, the folder that `tune download` makes of it; the setting for it, and what to do."""
    is_folder = value.startswith(("/", ".", "~")) or value.count("/") != 1 or Path(value).is_dir()
    return (value, [target], "") if is_folder else (f"./{value.split('/')[1]}", [target], f"tune download {value}")


def targets(run: Migration, key: str, value: Any) -> None:
    """Layers as a list, as `a,b`, as `all`, as a pattern, or by a switch (apply_lora_to_mlp)."""
    if isinstance(value, bool):
        value = [key.rpartition("_")[2]] if value else []
    elif isinstance(value, str) and re.fullmatch(r"[\w-]+(\s*,\s*[\w-]+)*", value):
        value = re.split(r"\s*,\s*", value)
    before = run.pop("_targets", [])
    if value in (["all"], ["all-linear"]):
        value = "all-linear"
    elif isinstance(value, list):
        value = [name for layer in value for name in LAYERS.get(layer, [layer])]
        is_pattern = isinstance(before.value, str)
        value = f"{before.value}|.*({'|'.join(value)})" if is_pattern else [*before.value, *value]
    run.set("_targets", value, *before.sources, key)


def named_datasets(run: Migration, key: str, value: Any) -> None:
    """LLaMA-Factory's names of data/dataset_info.json, as the files that these have as a rule."""
    step, folder = ("_val" if "eval" in key else "_data"), run.theirs.get("dataset_dir") or "data"
    for index, name in enumerate(value if isinstance(value, list) else re.split(r"\s*,\s*", str(value))):
        if name.endswith((".yaml", ".yml")):
            run.said[key] = "no counterpart", f"{name} lists the data: give what it names as dataset.path"
        elif "/" in name or "." in name or folder == "ONLINE":  # of the hub
            run.set(f"{step}[{index}].path", name, key)
        else:
            note = f"dataset_info.json says where '{name}' is: check the path{'' if index else f'; {BREAKS}'}"
            run.set(f"{step}[{index}].path", f"{folder}/{name}.json", key, note=note)


def preference_loss(run: Migration, key: str, value: str) -> None:
    """LLaMA-Factory's stage kto reads none."""
    if run.method == "kto":
        run.said[key] = "same by default", "stage: kto has a loss of its own"
    else:
        run.convert(key, value, {"to": "loss._component_", "values": "preference_losses"}, re.match("", key), False)  # type: ignore[arg-type]
        if value == "kto_pair":
            run.set("dataset.kind", "labelled", key)


def kd_ratio(run: Migration, key: str, value: float) -> None:
    """The share of the divergence there, that of the labels' cross-entropy here."""
    run.put(key, round(1 - value, 6), ["loss.cross_entropy"])


def beta(run: Migration, key: str, value: float) -> None:
    """The weight of the KL divergence; of GKD the place between the forward KL (0) and the reverse one (1)."""
    if run.recipe != "distill":
        run.put(key, value, ["kl", "loss.beta"])
        return
    name = {0.0: "ForwardKL", 1.0: "ReverseKL"}.get(value, "JensenShannon")
    run.set("loss._component_", f"tune.losses.{name}", key)
    if name == "JensenShannon":
        run.set("loss.beta", value, key)


def loss_type(run: Migration, key: str, value: Any) -> None:
    """TRL's word for a loss means another one with CPO's trainer, which has SimPO too."""
    words = [str(each).lower() for each in (value if isinstance(value, list) else [value])]
    if len(words) != 1:
        run.said[key] = "no counterpart", "several losses together: a loss of yours adds them (docs/changes.md)"
        return
    choices: dict[str, Any] = {
        "nll|kto|orpo": None,
        "sigmoid": "tune.losses.CPO" if run.method in ("cpo", "simpo") else "tune.losses.DPO",
        "ipo": None if run.method in ("cpo", "simpo") else "tune.losses.IPO",
        "simpo": "tune.losses.SimPO",
        "cispo": "tune.losses.PolicyGradient",
        "grpo|dapo|bnpo|dr_grpo": [
            None,
            "the sum over all live tokens of the step is divided by their number, as in dapo",
        ],
    }
    if words[0] == "ipo" and choices["ipo"] is None:
        run.said[key] = "no counterpart", "CPO's squared loss is not there"
        return
    run.convert(key, words[0], {"to": "loss._component_", "values": choices}, re.match("", key), False)  # type: ignore[arg-type]


def learned(run: Migration, key: str, value: bool) -> None:
    """Of TRL, what of a row is learned: completions, answers, or all."""
    completions, answers = (run.theirs.get(f"{each}_only_loss") for each in ("completion", "assistant"))
    if completions is False and not answers:
        run.set("_train_on", "all", key)
    elif completions is None and answers is False:
        note = "of rows with a prompt and a completion the completion alone is learned there"
        run.set("_train_on", "all", key, note=note)
    else:
        run.said[key] = "same by default", "answers alone are learned"


def temperature(run: Migration, key: str, value: float) -> None:
    """Of samples; students are sampled at 1 here."""
    if run.recipe != "distill":
        run.put(key, value, ["sampling.temperature"])
    elif value == 1:
        run.said[key] = "same by default", ""
    else:
        run.said[key] = "no counterpart", "the student's answers are sampled at a temperature of 1"


def compared(run: Migration) -> None:
    """SimPO's margin and CPO's likelihood of the chosen answer, which TRL adds to SimPO's loss too."""
    gamma, nll = run.pop("_gamma"), run.pop("_nll")
    loss = str(run.settings.get("loss._component_", Setting("", [])).value)
    if loss.endswith("SimPO"):
        if gamma.value is not None:
            run.set("loss.gamma", gamma.value, *gamma.sources)
        says = "no counterpart", "the likelihood of the chosen answer, times this, is not part of SimPO's loss"
        run.said.update(dict.fromkeys(nll.sources, says if nll.value else ("same by default", "off there too")))
        return
    run.said.update(dict.fromkeys(gamma.sources, ("same by default", "only SimPO has a margin")))
    if nll.value is not None and loss.endswith("CPO"):
        run.set("loss.nll", nll.value, *nll.sources)
    else:
        run.said.update(dict.fromkeys(nll.sources, ("same by default", "only CPO has it")))


def ppo_target(run: Migration, key: str, value: float) -> None:
    """LLaMA-Factory's PPO is that of TRL 0.9, with weights that no key of its files changes."""
    if run.recipe == "ppo_finetune":
        run.put(key, 0.2, ["kl"], note=f"there it begins at 0.2 and follows the target {value}; here it stays")
        run.put(key, 0.1, ["value_weight"])
    else:
        run.said[key] = "same by default", "only stage: ppo has it"


def too_long(run: Migration, key: str, value: str) -> None:
    """TRL cuts the end of what is too long, also of a text, unless this is packed in one of two ways."""
    if key == "packing_strategy":
        if value in ("bfd_split", "bfd-requeue", "wrapped") and run.theirs.get("packing"):
            run.put(key, "split", ["dataset.too_long"])
        else:
            run.said[key] = "same by default", "rows are packed whole"
    elif value != "keep_start":
        run.said[key] = "no counterpart", "the end of a row is cut, not its beginning"
    elif run.takes("dataset.too_long"):
        run.put(key, "truncate", ["dataset.too_long"], implied=True)
    else:
        run.said[key] = "same by default", "the end of a row is cut"


def epsilon(run: Migration, key: str, value: float) -> None:
    """One bound of the ratio is both, unless there is another for above."""
    run.put(key, value, ["loss.low"])
    run.put(key, value, ["loss.high"], implied=True)


def batch(run: Migration) -> None:
    """Theirs per device, times accumulation, times devices with other rows: ours is that of an optimizer step."""
    micro, steps, whole = run.pop("_micro", 1), run.pop("_accumulation", 1), run.pop("_global")
    sizes = {axis: run.settings.get(f"parallel.{axis}", Setting(1, [])).value for axis in AXES}
    sizes = {axis: size if isinstance(size, int) and size > 0 else 1 for axis, size in sizes.items()}
    same = sizes["cp"] * sizes["tp"] * sizes["pp"]  # devices that read the same rows
    devices = max(run.world_size, math.prod(sizes.values())) // same
    rows = micro.value * steps.value * devices
    of_devices = f" groups of {same}" if same > 1 else ""
    note = f"{micro.value} a device x {steps.value} accumulated x {devices}{of_devices} devices (--world-size)"
    used = [*micro.sources, *steps.sources]
    if "prompts_per_step" in run.settings:  # torchtune counts prompts, and the completions of a whole run of PPO
        if run.recipe == "ppo_finetune" and (last := run.settings.get("max_steps")):
            last.value //= run.settings["prompts_per_step"].value
            last.notes.append("completions there, steps here")
        run.settings["prompts_per_step"].value *= devices
        run.said.update(dict.fromkeys(used, ("same by default", "gradients accumulate until the step is complete")))
    elif run.takes("prompts_per_step"):
        group = run.settings.get("group_size", Setting(1, [])).value
        note = f"{note} are completions there; {group} of each prompt"
        prompts = max(1, rows // group)
        run.set("prompts_per_step", prompts, *used, note=note)
        if (last := run.settings.get("max_steps")) and "total_episodes" in last.sources:
            last.value = max(1, last.value // prompts)
            last.notes.append("completions there, steps here")
    elif run.takes("global_batch_size"):
        run.set("global_batch_size", whole.value or rows, *used, *whole.sources, note="" if whole.value else note)
    if micro.sources and run.takes("micro_batch_size"):
        run.set("micro_batch_size", micro.value, *micro.sources)


def precision(run: Migration) -> None:
    """The type of the computation, and that of the parameters where it is stated or, as in axolotl, the same."""
    bf16, fp16, weights = run.pop("_bf16"), run.pop("_fp16"), run.pop("_weights")
    said = {name: str(each.value).lower() for name, each in (("bf16", bf16), ("fp16", fp16), ("weights", weights))}
    computed = bf16 if bf16.value is not None else weights
    is_bf16 = said["bf16"] in ("true", "auto", "full") or (computed is weights and "bf" in said["weights"])
    is_fp16 = said["fp16"] == "true" or (not is_bf16 and said["weights"] in ("fp16", "float16"))
    is_off = not (is_bf16 or is_fp16 or weights.sources)
    if run.peer == "llama_factory" and run.has_adapter and is_off and not run.theirs.get("use_cpu"):
        why = "same by default", "a base that is not trained computes in its own type there, which is bf16 as a rule"
        run.said.update(dict.fromkeys([*bf16.sources, *fp16.sources], why))
    elif computed.value is not None or is_fp16:
        note = "with a loss scale; bf16 needs none, on GPUs that have it" if is_fp16 else ""
        kind = "bf16" if is_bf16 else "fp32"
        run.set("dtype", "fp16" if is_fp16 else kind, *computed.sources, *fp16.sources, note=note)
    in_bf16 = "bf" in said["weights"] or (run.peer == "axolotl" and is_bf16)
    if in_bf16 and not run.has_adapter and run.takes("master_dtype"):
        run.set("master_dtype", "bf16", *(weights.sources or bf16.sources), note=ROUNDED)
    elif computed is not weights:
        run.said.update(dict.fromkeys(weights.sources, ("same by default", "trained parameters are in fp32")))


def optimizer(run: Migration) -> None:
    first, second, name = run.pop("_beta1", 0.9), run.pop("_beta2", 0.999), run.settings.get("optimizer._component_")
    if not run.takes("optimizer.betas"):
        return
    if name is None or "Adam" in name.value:
        if "optimizer.betas" not in run.settings:  # torchtune has both in one key
            run.set("optimizer.betas", [first.value, second.value], *first.sources, *second.sources)
    else:
        used = [*first.sources, *second.sources, *run.pop("optimizer.betas").sources]
        # adam_epsilon is Adam's alone; torchtune's eps is that of any optimizer.
        if run.peer != "torchtune" or "eps" not in signature_of(name.value).parameters:
            used += run.pop("optimizer.eps").sources
        run.said.update(dict.fromkeys(used, ("no counterpart", f"{name.value} has none")))


def schedule(run: Migration) -> None:
    steps, ratio, floor, lowest = map(run.pop, ("_warmup_steps", "_warmup_ratio", "_min_ratio", "_min_lr"))
    kind, rate = run.settings.get("schedule._component_"), run.settings.get("optimizer.lr")
    if run.peer == "axolotl" and steps.sources:  # a number of steps, also of 0, is taken before a share of them
        ratio = Setting(None, ratio.sources)
    if kind is None or not run.takes("schedule.warmup"):
        return
    used = steps.sources if steps.value or ratio.value is None else ratio.sources
    warmup = steps.value or ratio.value or 0
    note = "the first step there has a rate of 0" if warmup else ""
    note += ", and a share of the steps is rounded up" if 0 < warmup < 1 else ""
    last = run.settings.get("max_steps")
    if last and last.value and warmup > max(1, last.value):
        note = f"max_steps={last.value} ends there before the rate is what the file says"
        warmup = last.value
    run.set("schedule.warmup", warmup, *used, note=note)
    if not kind.value.endswith(("constant", "square_root")):
        least = round(lowest.value / rate.value, 6) if lowest.value and rate else floor.value or 0.0
        run.set("schedule.min_ratio", least, *kind.sources, *floor.sources, *lowest.sources)


def layers(run: Migration) -> None:
    """The layers that get an adapter, and how the others are kept."""
    named, linear, rank = run.pop("_targets"), run.pop("_target_linear"), run.settings.get("adapter.rank")
    if not run.has_adapter or linear.value is False:
        why = "off there too" if run.has_adapter else "no adapter is trained"
        used = linear.sources if run.has_adapter else [*named.sources, *linear.sources]
        run.said.update(dict.fromkeys(used, ("same by default", why)))
    if run.has_adapter and linear.value:
        note = "all-linear includes them" if named.value else ""
        run.set("adapter.target_modules", "all-linear", *linear.sources, *named.sources, note=note)
    elif run.has_adapter:
        run.set("adapter.target_modules", named.value or ["q_proj", "v_proj"], *named.sources)  # PEFT's, of a Llama
    if "adapter.alpha" not in run.settings and rank:  # LLaMA-Factory's rule
        run.set("adapter.alpha", 2 * rank.value, *rank.sources)
    dropout, none = run.settings.get("adapter.dropout"), table(run.peer).get("no_dropout")
    if none and dropout and dropout.value and holds(none, run.usual | {"method": run.method} | run.theirs):
        run.set("adapter.dropout", 0.0, note="the trainer there turns off all dropout, also that of adapters")
    if not run.settings.get("quantization.weights", Setting(None, [])).value:
        used = run.pop("quantization.double").sources
        run.said.update(dict.fromkeys(used, ("same by default", "no weights are quantised")))
    if "adapter.path" in run.settings:
        for key in [key for key in run.settings if re.fullmatch(r"adapter\.(?!path|dropout).*", key)]:
            sources = run.pop(key).sources
            run.said.update(dict.fromkeys(sources, ("same by default", "the adapter in adapter.path says it")))
        compares = run.method == "dpo" and run.theirs.get("pref_loss") not in ("orpo", "simpo")
        if run.peer == "llama_factory" and compares:
            base, used = run.settings["model.path"].value, run.settings["adapter.path"].sources
            run.put(used[0], base, ["reference"], "the reference there is the base without the adapter", implied=True)


def data(run: Migration) -> None:
    """One source becomes `dataset`, several a mixture; a slice of a split becomes what there is for it."""
    learned, take, way, shares = (run.pop(key) for key in ("_train_on", "_take", "_way", "_shares"))
    if learned.value and run.takes("dataset.train_on"):
        run.set("dataset.train_on", learned.value, *learned.sources, note="; ".join(learned.notes))
    template = run.settings.get("tokenizer.chat_template")
    chats = [key for key, value in run.theirs.items() if key.endswith("].type") and value == "chat_template"]
    if template and chats and all(key.endswith("].type") for key in template.sources):
        run.refuse("tokenizer.chat_template", f"beside {chats[0]}=chat_template all have the checkpoint's own")
    if run.peer == "torchtune" and "max_seq_len" in run.settings and run.takes("dataset.too_long"):
        builders = [key for key, value in run.theirs.items() if re.search(TEXTS, f"{key}={value}")]
        if builders:
            run.set("dataset.too_long", "truncate", *builders, *run.settings["max_seq_len"].sources)
    sources, held_out = _items(run, "_data"), _items(run, "_val")
    if "dataset_name" in run.theirs:  # TRL's scripts validate on a split of the same data, if at all
        split = held_out[0]["split"] if held_out else Setting("test", ["eval_strategy"])
        held_out = [sources[0] | {"split": split}]
        if run.theirs.get("eval_strategy") in (None, False, "no"):
            held_out, run.said = [], run.said | dict.fromkeys(split.sources, ("same by default", "off there too"))
    if sources and held_out and _is_rest(sources[0], held_out[0]):
        done, rest = sources[0].pop("split"), held_out[0]
        used = [*done.sources, *(name for each in rest.values() for name in each.sources)]
        share = round(1 - int(re.findall(r"\d+", done.value)[-1]) / 100, 4)
        run.set("dataset.validation_fraction", share, *used, note="which rows follows from what is in them")
        held_out = []
    for each in (*sources, *held_out[:1]):
        _settle(each)
        # Prompts are no texts to learn, and of pairs the messages are what comes before the answers.
        asks = "messages" if run.recipe in COMPARE else None
        if "prompts_per_step" in run.defaults:
            asks = "text"
        if "columns" in each and asks in each["columns"].value:
            columns = {"prompt" if ours == asks else ours: theirs for ours, theirs in each["columns"].value.items()}
            each["columns"].value = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
            if not each["columns"].value:
                run.said.update(dict.fromkeys(each.pop("columns").sources, ("same by default", "")))
    for each in sources if take.value else []:
        each["take"] = Setting(take.value, take.sources, ["the first rows"])
    for each in held_out[:1]:
        _put(run, "validation_dataset", each)
    ends = {"interleave_over": "all_exhausted", "interleave_under": "first_exhausted"}.get(str(way.value))
    if len(sources) == 1:
        _put(run, "dataset", sources[0])
    elif sources and "prompts_per_step" not in run.defaults:
        weights = re.findall(r"[\d.]+", str(shares.value)) or [1] * len(sources)  # by turns
        for each, weight in zip(sources, weights, strict=False) if ends else ():
            each["weight"] = Setting(float(weight), shares.sources)
        _mix(run, sources)
        if ends:
            run.set("dataset.epoch_ends", ends, *way.sources)
    if len(sources) < 2 or not ends:
        run.said.update(dict.fromkeys([*way.sources, *shares.sources], ("same by default", "")))
    streams = run.settings.get("dataset.streaming")  # which a mixture has not
    if not (streams and streams.value):
        used = run.pop("dataset.shuffle_buffer").sources
        run.said.update(dict.fromkeys(used, ("same by default", "all rows are shuffled where they are not streamed")))
    if streams and streams.value and "epochs" in run.settings:
        run.refuse("epochs", "a stream is read until max_steps")
    many = sources if len(sources) > 1 and "prompts_per_step" in run.defaults else []
    for key in [name for each in (*many, *held_out[1:]) for setting in each.values() for name in setting.sources]:
        run.said[key] = "no counterpart", "one set of rows is read here: join the files"


def _mix(run: Migration, sources: list[Arguments]) -> None:
    for key in {"dataset.streaming", "dataset.shuffle_buffer"} & run.settings.keys():
        run.refuse(key, "a mixture is not streamed")
    shared = {key[8:]: run.settings.pop(key) for key in [*run.settings] if key.startswith("dataset.")}
    parts: dict[str, dict[str, Any]] = {}
    for index, each in enumerate(sources):
        name = re.sub(r"\W+", "_", PurePosixPath(str(each["path"].value if "path" in each else "source")).stem)
        name = f"{name}_{index}" if name in parts else name
        parts[name] = {key: setting.value for key, setting in (each | shared).items()}
    every = [*shared.values(), *(setting for each in sources for setting in each.values())]
    used = list(dict.fromkeys(key for each in every for key in each.sources))
    run.settings["dataset._component_"] = Setting("tune.datasets.mix", used)
    notes = list(dict.fromkeys(note for each in every for note in each.notes))
    run.settings["dataset.sources"] = Setting(parts, used, notes)


def _items(run: Migration, step: str) -> list[Arguments]:
    """The steps `_data[0].path`, one dict for each index."""
    found: dict[int, Arguments] = defaultdict(dict)
    for key in [key for key in run.settings if key.startswith(f"{step}[")]:
        index, _, name = key.removeprefix(f"{step}[").partition("].")
        found[int(index)][name] = run.pop(key)
    return [found[index] for index in sorted(found)]


def _is_rest(one: Arguments, other: Arguments) -> bool:
    """Whether the second is what the first leaves of a split: `train[:95%]` and `train[95%:]`."""
    splits = [re.sub(r"\s", "", str(each["split"].value)) for each in (one, other) if "split" in each]
    return re.fullmatch(r"(\w+)\[:(\d+%)\] \1\[\2:\]", " ".join(splits)) is not None


def _settle(source: Arguments) -> None:
    """Slices of splits, files, and names of columns, as arguments of `tune.datasets.load`."""
    split, files, path = source.get("split"), source.pop("data_files", None), source.get("path")
    if split and (cut := re.fullmatch(r"(\w+)\[(:(\d+))?.*\]", re.sub(r"\s", "", str(split.value)))):
        if cut[3] and cut[0] == f"{cut[1]}[:{cut[3]}]":
            source["take"] = Setting(int(cut[3]), split.sources)
        else:
            split.notes.append(f"{split.value} there, all rows here: dataset.take is a number of rows")
        split.value = cut[1]
    if files and path and path.value not in FILES:
        path.notes.append(f"its data_files {files.value} are not chosen: dataset.path can be their folder or glob")
        path.sources.extend(files.sources)
    elif files:
        chosen = files.value if isinstance(files.value, list) else [files.value]
        notes = ["the first of its files: a folder or a glob names several"] if len(chosen) > 1 else []
        source["path"] = Setting(chosen[0], [*files.sources, *(path.sources if path else [])], notes)
    columns = {key[8:]: source.pop(key) for key in [*source] if key.startswith("columns.")}
    if columns:
        known = source.get("columns", Setting({}, []))
        used = [*known.sources, *(name for each in columns.values() for name in each.sources)]
        source["columns"] = Setting(known.value | {key: each.value for key, each in columns.items()}, used)


def _put(run: Migration, group: str, source: Arguments) -> None:
    for name, setting in source.items():
        if run.takes(f"{group}.{name}"):
            run.set(f"{group}.{name}", setting.value, *setting.sources, note="; ".join(setting.notes))
        elif (name, setting.value) == ("train_on", "assistant"):
            run.said.update(dict.fromkeys(setting.sources, ("same by default", "answers alone are learned")))
        else:
            run.said.update(dict.fromkeys(setting.sources, ("no counterpart", f"{run.recipe} has no {group}.{name}")))


FINISH = (batch, precision, optimizer, schedule, layers, data, compared)

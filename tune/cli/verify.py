"""Check that an exported model equals the trained one. It opens ARTIFACT in the program that users will use, and
compares tokens, chat template, stop tokens, greedy answers, perplexity and settings with the run's own model. Exit code
1 if one differs, 2 if they cannot be compared.

    tune export runs/mine --to gguf --out mine.gguf && tune verify mine.gguf --against runs/mine
    tune verify ./merged --against runs/mine --prompts questions.jsonl
    tune verify ./int4 --against runs/mine --with vllm

llama.cpp opens a GGUF file, PEFT an adapter, and transformers any other folder. vLLM opens models if it is installed.
"""

import errno
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tune.cli.model_options import add_step
from tune.cli.output import print_table
from tune.errors import TuneError, explained
from tune.launchers import count
from tune.lookup import local_path
from tune.run_settings import COMPONENTS, read_settings, require_local, settings_file
from tune.terminal import visible

PROGRAMS = ("transformers", "peft", "llama.cpp", "vllm")
ANSWER = 32  # tokens
NOISE, NOISE_OF_16_BITS = 0.002, 0.03  # nats by which programs differ in fp32 and in 16 bits
PROMPT = 4096  # maximum tokens of a prompt and its answer
MEASURED = ("log-probs", "perplexity")  # without these checks, the two models have not been compared
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a disk without space, or of a user's share of it
# Settings of a dataset that decide how rows are read.
READING = ("split", "subset", "format", "columns", "ignore", "kind")


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = (
        "tune verify ARTIFACT --against RUN [--step N] [--with PROGRAM] [--prompts FILE] [--limit N] [--tokens N] "
        "[--tolerance NATS] [--device NAME] [--dtype TYPE]"
    )
    parser.add_argument("artifact", metavar="ARTIFACT", type=local_path, help="a .gguf file, a model or an adapter")
    parser.add_argument("--against", required=True, metavar="RUN", help="the run, model or adapter it was made from")
    add_step(parser)
    parser.add_argument(
        "--with",
        dest="program",
        choices=PROGRAMS,
        metavar="PROGRAM",
        help=f"program to open ARTIFACT: {', '.join(PROGRAMS)}",
    )
    file = "prompts, as for tune generate (default: rows from the run's validation or training data)"
    parser.add_argument("--prompts", metavar="FILE", help=file)
    parser.add_argument("--limit", metavar="N", type=count, default=8, help="number of texts (default: 8)")
    parser.add_argument("--tokens", metavar="N", type=count, default=128, help="most tokens of a text (default: 128)")
    nats = "allowed difference per token (default: twice the effect of rounding to ARTIFACT's type)"
    parser.add_argument("--tolerance", metavar="NATS", type=float, help=nats)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    dtype = "type of the computation: bf16, fp16 or fp32 (default: fp32)"
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="fp32", metavar="TYPE", help=dtype)
    options = parser.parse_args(arguments)
    if options.tolerance is not None and not options.tolerance > 0:
        parser.error(f"--tolerance {options.tolerance}: set a number above 0")
    if options.tokens < 2:
        parser.error(f"--tokens {options.tokens}: the first token of a text is not predicted. Set 2 or more")
    try:
        checks = verify(options)
    except TuneError:
        raise
    except Exception as error:  # Python would exit with 1, which means a difference
        if not _is_full(error):
            print(visible(traceback.format_exc()), end="", file=sys.stderr)
        print(visible(f"error: the models were not compared: {type(error).__name__}: {error}"), file=sys.stderr)
        sys.exit(2)
    words = {True: "same", False: "DIFFERENT", None: "not comparable"}
    rows = [(*astuple(each)[:5], words[each.is_same]) for each in checks]
    print_table([("check", "run", "artifact", "difference", "tolerance", ""), *rows])
    different = [each for each in checks if each.is_same is False]
    for each in checks:
        if each in different or each.detail:
            print(visible(f"{each.name}: {each.detail or f'{each.difference}, where {each.tolerance} is allowed'}"))
    if different:
        sys.exit(1)
    if any(each.is_same is None and each.name in MEASURED for each in checks):
        sys.exit(2)


def verify(options: Namespace) -> list[Any]:
    """Return the checks of the artifact. Only one of the two models is in memory at a time."""
    from tune import distributed
    from tune.convert import notes_of
    from tune.files import is_adapter
    from tune.models import ConfigFile, Decoder
    from tune.peft import CONFIG, exported_folder, open_model, read_adapter_config, step_of
    from tune.records import is_run
    from tune.verify import ask, compare, compare_settings, computed_in, open_program, type_of

    artifact: Path = options.artifact
    if not artifact.exists():
        raise TuneError(f"{artifact}: no such file or folder")
    if is_run(artifact):
        results = [str(artifact / name) for name in ("model", "adapter") if (artifact / name).is_dir()]
        made = " or ".join(results) or "a folder or file that tune export made of it"
        raise TuneError(f"{artifact} is a run, not its result. Name {made} first, and the run after --against")
    if is_adapter(artifact):
        base = read_adapter_config(artifact).get("base_model_name_or_path") or ""
        if not base or not Path(base).exists():
            raise TuneError(
                f"{artifact / CONFIG}: base_model_name_or_path is {base!r}, which is not a folder here, so no program "
                "can open the adapter. Set it to the folder of the base (`tune download` gets a model from the hub)"
            )
    run, step = step_of(options.against, options.step)
    # Take the adapter even if the run has also merged it, so that its effect can be measured.
    against = exported_folder(run, "adapter") if step is None and run.is_dir() else run
    opened = open_model(against, step=step)
    stored = type_of(artifact, opened.folders.base)
    tokenizer = opened.tokenizer(date=None)
    room = min(PROMPT, opened.model.max_generated or PROMPT) - ANSWER
    asked = probes_of(options, run, tokenizer, room)
    probes = [probe for probe in asked if len(probe.prompt) <= room and len(probe.ids) > 1]
    if not probes:
        raise TuneError(f"no text has at least 2 tokens and a prompt of at most {room:,} tokens. Use other --prompts")
    if longest := [probe for probe in probes if len(probe.ids) == options.tokens]:
        compared = f"{len(longest)} of {len(probes)} texts are compared up to token {options.tokens} only"
        print(f"note: {compared}. --tokens sets another number", file=sys.stderr, flush=True)
    device = distributed.init(options.device).device
    context = max(max(len(each.prompt) + ANSWER, len(each.ids)) for each in probes) + 16
    with open_program(artifact, options.program, device, options.dtype, context) as program:
        words = f"{artifact} in {program.name}, against {against}; weights in {stored}, on {device}"
        print(visible(words), file=sys.stderr, flush=True)
        with explained(f"{program.name} cannot compute with {artifact}", Exception):
            found = ask(program, tokenizer, probes, ANSWER)
        opened_in = program.name
    del program  # and its memory, before the run's model is loaded
    settings = compare_settings(artifact, opened_in, opened.folders.base, opened.model)
    if artifact.is_file() and isinstance(opened.model, Decoder):
        for note in notes_of(opened.model.config, str(ConfigFile(opened.folders.base).get("model_type"))):
            print(visible(f"note: {note}"), flush=True)
    model = opened.load(device, options.dtype)
    floor = NOISE if computed_in(artifact, options.dtype).itemsize > 2 else NOISE_OF_16_BITS
    return [*compare(found, model, tokenizer, probes, options.tolerance, stored, floor), *settings]


def probes_of(options: Namespace, run: Path, tokenizer: Any, room: int) -> list[Any]:
    """Return the probes for both models: from the file, from the run's data, or from the texts shipped with tune."""
    from tune.datasets import placed_rows
    from tune.verify import probes_of_prompts, probes_of_texts

    if options.prompts:
        rows = placed_rows(options.prompts, "--prompts")[: options.limit]
        return probes_of_prompts(rows, tokenizer, options.tokens)
    try:
        return probes_of_run(options, run, tokenizer, room)
    except TuneError as error:
        if _is_full(error):
            raise
        print(f"using the shipped texts (--prompts sets others): {error}", file=sys.stderr)
        return probes_of_texts(tokenizer, options.tokens)[: options.limit]


def _is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it explains, is that of a disk without space."""
    return error is not None and (getattr(error, "errno", None) in FULL or _is_full(error.__cause__))


def probes_of_run(options: Namespace, run: Path, tokenizer: Any, room: int) -> list[Any]:
    """Return probes from the run's validation data, or else its training data. Raises TuneError if unreadable.

    It runs no code named in the run's settings, because another person may have written it.
    """
    from tune.datasets import load, load_prompts
    from tune.verify import probes_of_data, probes_of_prompts

    component, path, reading = data_of_run(run)
    if component == "tune.datasets.load_prompts":
        names = ("split", "subset", "columns", "ignore")
        reading = {name: value for name, value in reading.items() if name in names}
        with tempfile.TemporaryDirectory() as cache:
            prompts = load_prompts(
                tokenizer, path, max_prompt_len=room, take=options.limit, cache_dir=cache, workers=1, **reading
            )
            return probes_of_prompts([("", prompt.row) for prompt in prompts], tokenizer, options.tokens)
    with tempfile.TemporaryDirectory() as cache:
        dataset: Any = load(
            tokenizer, path, max_seq_len=room, take=options.limit, cache_dir=cache, workers=1, on_bad_row="skip",
            max_bad_share=0.99, **reading,
        )  # fmt: skip
        return probes_of_data([dataset.row(at) for at in range(len(dataset))], tokenizer, options.tokens)


def data_of_run(run: Path) -> tuple[str, str, dict[str, Any]]:
    """Return component, path and reading settings of a run's validation data, or else its training data.

    Raises TuneError if no data can be read without the run's own code.
    """
    file = settings_file(run)
    if file is None:
        raise TuneError(f"{run} has no config.yaml, which names its training data")
    settings: Any = read_settings(file)
    training: Any = settings.get("dataset")
    training = training if isinstance(training, dict) else {}
    validation = training.get("validation")
    validation = {"path": validation} if isinstance(validation, str) else validation
    groups: list[Any] = [{**training, **validation}] if isinstance(validation, dict) else []
    groups.append(training)
    if (sources := training.get("sources")) and isinstance(sources, dict):  # of a mixture
        groups += [{**training, **source} for source in sources.values() if isinstance(source, dict)]
    group = next((group for group in groups if isinstance(group.get("path"), str)), None)
    if group is None:
        raise TuneError(f"{file} names no data path")
    component, path = str(group.get("_component_")), require_local(group["path"], "dataset.path", file)
    reading = {name: training[name] for name in ("format", "columns", "ignore", "kind") if training.get(name)}
    reading |= {name: group[name] for name in READING if group.get(name)}
    if component not in COMPONENTS or "." in str(reading.get("format")):
        raise TuneError(f"{file}: {path} needs custom code, which tune verify does not run")
    return component, path, reading

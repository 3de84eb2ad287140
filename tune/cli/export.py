"""Write the model of a run as GGUF, for llama.cpp and Ollama, or in Hugging Face layout: also that of a model folder,
or of an adapter, which is merged into its base; or an adapter alone as GGUF (gguf-lora)."""

import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tune.cli.convert import new_folder
from tune.errors import TuneError
from tune.files import CHECKPOINT
from tune.lookup import in_shell, local_path

# What a run folder may have made. It can come from another person, and a component can be any function.
COMPONENTS = {
    "model": ("tune.models.build", "tune.models.hf"),
    "adapter": ("tune.peft.adapter", "tune.peft.LoRA"),
    "tokenizer": ("tune.tokenizers.Tokenizer",),
}
OLLAMA = (
    "Ollama does not run the chat template in the file, which is Jinja, but the nearest one of its own: compare "
    "`ollama show --template NAME`, and add a TEMPLATE to the Modelfile where it differs"
)
KINDS, TYPES = ("gguf", "gguf-lora", "hf"), ("f16", "bf16", "q8_0", "q4_0")


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = f"tune export RUN_OR_FOLDER --to {'|'.join(KINDS)} --out PATH [--type {'|'.join(TYPES)}] [--step N]"
    parser.add_argument("source", metavar="RUN_OR_FOLDER", type=local_path, help="a run, a model folder, or an adapter")
    parser.add_argument("--to", required=True, choices=KINDS)
    parser.add_argument("--out", required=True, type=local_path, help="to write, a new one: a file, or for hf a folder")
    parser.add_argument("--type", choices=TYPES, help="of weights in GGUF (default: f16)")
    add_step(parser)
    options = parser.parse_args(arguments)
    options.source, options.step = run_and_step(options.source, options.step)
    if options.type and options.to != "gguf":
        raise TuneError(f"--type is for --to gguf; with --to {options.to} types stay as they are")
    out: Path = options.out
    recipe = out.with_name(f"{out.name}.Modelfile")
    if options.to != "hf" and recipe.exists():
        raise TuneError(f"{recipe}, which is for Ollama, exists already. Name another --out, or move it")
    with new_folder(out):
        from tune import convert, peft
        from tune.models import ConfigFile
        from tune.peft import exported_folder
        from tune.tokenizers import Tokenizer

        if options.step is not None:
            model, base, path, tokenizer = at_step(options.source, options.step)
            title = f"`{Path(path).name}` after step {options.step} of the run `{options.source.name}`"
        else:
            first: Any = "adapter" if options.to == "gguf-lora" else "model"
            found = peft.resolve_model(exported_folder(options.source, first))
            model, base, tokenizer = peft.open_on_disk(found.base, next(iter(found.adapters), None))
            path, title = str(found.base), found.title
        if options.to == "hf":
            write(model, tokenizer, out, path, f"{title}, written by `tune export`.", base=base)
            commands = [served_by(model, out)]
        elif options.to == "gguf-lora":
            convert.export_gguf_lora(model, out, str(ConfigFile(Path(path)).get("model_type")))
            recipe.write_text(f"FROM ./BASE.gguf\nADAPTER ./{out.name}\n", encoding="utf-8")
            commands = [f"llama-cli -m BASE.gguf --lora {in_shell(out)}"]
            create = f"ollama create {in_shell(out.stem.lower())} -f {in_shell(recipe)}"
            commands.append(f"{create}  # name your base in its first line")
        else:
            tokenizer = tokenizer or Tokenizer(path)
            family = str(ConfigFile(Path(path)).get("model_type"))
            for note in convert.export_gguf(model, base, tokenizer, out, family, options.type or "f16"):
                print(f"note: {note}")
            recipe.write_text(modelfile(tokenizer, out.name), encoding="utf-8")
            if tokenizer.chat_template:
                print(f"note: {OLLAMA}")
            name = in_shell(out.stem.lower())
            create = f"ollama create {name} -f {in_shell(recipe)}"
            commands = [f"llama-cli -m {in_shell(out)}", f"{create} && ollama run {name}"]
    print("to use it:", *commands, sep="\n  ")


def add_step(parser: ArgumentParser) -> None:
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of the run after N optimizer steps")


def run_and_step(source: Path, step: int | None) -> tuple[Path, int | None]:
    """Also of RUN/checkpoints/step-N."""
    if step is None and source.parent.name == "checkpoints" and source.match(CHECKPOINT):
        return source.parent.parent, int(source.name.removeprefix("step-"))
    return source, step


@contextmanager
def model_at(source: str | Path, step: int | None = None) -> Iterator[str]:
    """`source`, or if that and `step` name a checkpoint of a run a folder in the run with its model, as `tune export`
    writes it, for as long as the block lasts. Raises TuneError in processes of torchrun, each of which would write."""
    run, step = run_and_step(Path(source), step)
    if step is None:
        yield str(source)
        return
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        first = f"tune export {in_shell(run)} --step {step} --to hf --out FOLDER"
        raise TuneError(f"write the model of the checkpoint first: `{first}`, and name FOLDER")
    command = ["export", str(run.absolute()), "--step", str(step), "--to", "hf"]
    with TemporaryDirectory(dir=run if run.is_dir() else None, prefix=f".step-{step}-") as folder:
        written = f"{folder}/{run.name}-step-{step}"  # by a process of its own, as this one may use a GPU
        done = subprocess.run(
            [sys.executable, "-m", "tune.cli", *command, f"--out={written}"], stdout=subprocess.DEVNULL
        )
        if done.returncode:
            sys.exit(done.returncode)
        yield written


def served_by(model: Any, out: Path) -> str:
    """The command that serves the folder, and of a reward model what to ask for then."""
    command = f"vllm serve {in_shell(out)}"
    if not getattr(model.config, "scores", False):
        return command
    asked = '# POST /classify with "use_activation": false gives the scores, and without it their sigmoid'
    return f"{command} --runner pooling\n  {asked}\n  # in transformers: AutoModelForSequenceClassification"


def write(model: Any, tokenizer: Any, out: Path, path: str, what: str, **others: Any) -> None:
    """Write a model in Hugging Face layout, with a card; `path` is that of its base."""
    from tune import checkpointers, distributed

    text = checkpointers.card(Path(path), what)
    checkpointers.export(model, tokenizer, out, distributed.init("cpu"), source=path, card=text, **others)


def at_step(run: Path, step: int) -> tuple[Any, Any, str, Any]:
    """The model of a run at a checkpoint: with memory for what was trained; the weights of the rest, if any; the path
    of its base; its tokenizer."""
    import torch
    from omegaconf import OmegaConf

    from tune import checkpointers, peft
    from tune.config import instantiate

    found = {int(each.name.removeprefix("step-")): each for each in sorted(run.glob(f"checkpoints/{CHECKPOINT}"))}
    settings = sorted(run.glob("config*.yaml"), key=lambda file: (len(file.name), file.name))
    if step not in found or not settings:
        steps = ", ".join(map(str, found)) or "none"
        raise TuneError(f"{run} has no checkpoint of step {step}; it has {steps}. Name a run and one of its steps")
    cfg: Any = OmegaConf.load(settings[-1])
    for key, known in COMPONENTS.items():
        if cfg.get(key) and (component := cfg[key].get("_component_")) not in known:
            raise TuneError(
                f"{settings[-1]}: {key}._component_ is {component}; --step takes {' or '.join(known)}, as others could "
                "be any code. Export the result of the run, without --step"
            )
    if cfg.model.get("trust_remote_code"):
        raise TuneError(f"{settings[-1]}: model.trust_remote_code would run code. Export the result, without --step")
    with torch.device("meta"):
        model = instantiate(cfg.model)
    lora = instantiate(cfg.adapter) if cfg.get("adapter") else None
    base = checkpointers.Pretrained(cfg.model.path, model) if lora else None
    if lora:
        peft.add_adapters(model, lora)
        if any(getattr(layer, "start_a", None) is not None for layer in peft.adapted_modules(model).values()):
            raise TuneError(
                f"{settings[-1]}: adapter.init={lora.init} is relative to values that a checkpoint does not hold. "
                "Export the result of the run, without --step"
            )
        peft.give_memory(model)
    else:
        model.to_empty(device="cpu")
    of_ppo = torch.nn.ModuleDict({"policy": model})  # whose checkpoints have a value model too
    checkpointers.read_trained(of_ppo if cfg.get("value") else model, found[step])
    return model, base, cfg.model.path, instantiate(cfg.tokenizer)


def modelfile(tokenizer: Any, file: str) -> str:
    """What Ollama makes a model of: the file, and where answers end. It does not run the chat template in the file."""
    ends = [tokenizer.decode([index]) for index in sorted(tokenizer.stop_ids)]
    quoted = [f'"""{end}"""' if '"' in end else f'"{end}"' for end in ends]
    lines = [f"FROM ./{file}", *(f"PARAMETER stop {end}" for end in quoted)]
    return "\n".join([*lines, ""])

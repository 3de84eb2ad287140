"""Export a model as GGUF for llama.cpp and Ollama, or in Hugging Face layout. The source is a run, a model folder, or
an adapter, which is merged into its base. With --to gguf-lora, only the adapter is exported."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from tune.cli.model_options import add_step
from tune.cli.output import new_folder, served_by
from tune.errors import TuneError
from tune.lookup import in_shell, local_path
from tune.terminal import visible

OLLAMA = (
    "Ollama does not run the Jinja chat template in the file, but its own nearest template. Compare it with "
    "`ollama show --template NAME`, and add a TEMPLATE to the Modelfile if it differs"
)
KINDS, TYPES = ("gguf", "gguf-lora", "hf"), ("f16", "bf16", "q8_0", "q4_0")


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = f"tune export RUN_OR_FOLDER --to {'|'.join(KINDS)} --out PATH [--type {'|'.join(TYPES)}] [--step N]"
    parser.add_argument("source", metavar="RUN_OR_FOLDER", type=local_path, help="a run, a model folder, or an adapter")
    parser.add_argument("--to", required=True, choices=KINDS)
    parser.add_argument("--out", required=True, type=local_path, help="the new file to write; for hf, a folder")
    parser.add_argument("--type", choices=TYPES, help="type of the weights in GGUF (default: f16)")
    add_step(parser)
    options = parser.parse_args(arguments)
    if options.type and options.to != "gguf":
        raise TuneError(f"--type is only for --to gguf; --to {options.to} keeps the types. Leave it out")
    out: Path = options.out
    recipe = out.with_name(f"{out.name}.Modelfile")
    if options.to != "hf" and recipe.exists():
        raise TuneError(f"{recipe} (for Ollama) already exists. Name another --out, or move the file")
    with new_folder(out):
        from tune import convert, peft
        from tune.models import ConfigFile

        source = options.source
        if options.to == "gguf-lora" and options.step is None:
            source = peft.exported_folder(source, "adapter")
        opened = peft.open_model(source, step=options.step, head=None)
        model, path = opened.on_disk(), opened.folders.base
        if options.to == "hf":
            opened.export(out, f"{opened.title}, written by `tune export`.")
            commands = [served_by(model, out)]
        elif options.to == "gguf-lora":
            convert.export_gguf_lora(model, out, str(ConfigFile(path).get("model_type")))
            recipe.write_text(f"FROM ./BASE.gguf\nADAPTER ./{out.name}\n", encoding="utf-8")
            commands = [f"llama-cli -m BASE.gguf --lora {in_shell(out)}"]
            create = f"ollama create {in_shell(out.stem.lower())} -f {in_shell(recipe)}"
            commands.append(f"{create}  # set your base in its first line")
        else:
            tokenizer = opened.exported_tokenizer() or opened.tokenizer()
            family = str(ConfigFile(path).get("model_type"))
            for note in convert.export_gguf(model, opened.base, tokenizer, out, family, options.type or "f16"):
                print(visible(f"note: {note}"))
            recipe.write_text(modelfile(tokenizer, out.name), encoding="utf-8")
            if tokenizer.chat_template:
                print(f"note: {OLLAMA}")
            name = in_shell(out.stem.lower())
            create = f"ollama create {name} -f {in_shell(recipe)}"
            commands = [f"llama-cli -m {in_shell(out)}", f"{create} && ollama run {name}"]
    print("to use it:", *map(visible, commands), sep="\n  ")


def modelfile(tokenizer: Any, file: str) -> str:
    """Return Ollama's Modelfile: the GGUF file and the stop strings. Ollama ignores the file's chat template."""
    ends = [tokenizer.decode([index]) for index in sorted(tokenizer.stop_ids)]
    quoted = [f'"""{end}"""' if '"' in end else f'"{end}"' for end in ends]
    lines = [f"FROM ./{file}", *(f"PARAMETER stop {end}" for end in quoted)]
    return "\n".join([*lines, ""])

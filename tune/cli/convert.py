"""Convert a GGUF file or a Llama in Meta's format to a folder in Hugging Face layout. SOURCE is a .gguf file, or a
folder with consolidated.00.pth and params.json."""

from argparse import ArgumentParser
from pathlib import Path

from tune.cli.output import new_folder
from tune.errors import TuneError
from tune.lookup import local_path
from tune.terminal import visible


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("source", metavar="SOURCE", type=local_path, help="a .gguf file, or a folder with params.json")
    parser.add_argument("out", metavar="OUT", type=local_path, help="the folder to write; it must be absent or empty")
    options = parser.parse_args(arguments)
    with new_folder(options.out):
        print(f"converting {options.source}", flush=True)
        for note in convert(options.source, options.out):
            print(visible(f"note: {note}"))


def convert(source: Path, out: Path) -> list[str]:
    """Write the model at `source` to `out`, which appears once it is complete. Returns notes on what to check.

    Raises:
        TuneError: `source` has an unknown format or architecture, or is damaged.
    """
    if not source.exists():
        raise TuneError(f"{source}: no such file or folder.")
    if source.is_file():
        from tune.convert import import_gguf

        return import_gguf(source, out)
    if not any(source.glob("consolidated*.pth")) and not (source / "params.json").exists():
        found = ", ".join(sorted(child.name for child in source.iterdir())[:8]) or "nothing"
        raise TuneError(
            f"{source} is not in Meta's format: it has neither consolidated.00.pth nor params.json; found {found}. For "
            "a GGUF model, name the file itself. A folder in Hugging Face layout needs no conversion."
        )
    from tune.convert import import_meta

    return import_meta(source, out)

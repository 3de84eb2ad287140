"""`tune convert`: a model in another format as a folder in Hugging Face layout."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tune.errors import TuneError


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tune convert",
        description="Turn a GGUF file, or a folder of a Llama in Meta's own format (consolidated.00.pth, params.json), "
        "into a folder in Hugging Face layout.",
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a .gguf file, or a folder with params.json")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write: absent or empty")
    options = parser.parse_args(arguments)
    check_absent(options.out)
    for note in convert(options.source, options.out):
        print(f"note: {note}")
    print(f"wrote {options.out}")


def convert(source: Path, out: Path) -> list[str]:
    """Write the model at `source` to `out`, which appears only when it is complete; returns what people should check.

    Raises:
        TuneError: it is in no format that is known, or damaged, or of an architecture that cannot be converted.
    """
    if not source.exists():
        raise TuneError(f"{source}: there is no such file or folder.")
    if source.is_file():
        from tune.checkpointers.gguf import import_gguf

        return import_gguf(source, out)
    if not any(source.glob("consolidated*.pth")) and not (source / "params.json").exists():
        found = ", ".join(sorted(child.name for child in source.iterdir())[:8]) or "nothing"
        raise TuneError(
            f"{source} is not in Meta's format: it has neither consolidated.00.pth nor params.json; found {found}. For "
            "a GGUF model name the file itself. A folder in Hugging Face layout needs no conversion."
        )
    from tune.checkpointers.meta import import_meta

    return import_meta(source, out)


def check_absent(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TuneError(f"{out} exists already. Name a folder that is absent or empty.")
    out.parent.mkdir(parents=True, exist_ok=True)

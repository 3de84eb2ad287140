"""Quantize a model to int8, int4, FP8, MXFP4 or NF4, for vLLM and transformers. MODEL is a model folder, an adapter
(merged into its base) or a run. Only linear layers of its blocks are quantized: int8 and fp8 with a scale for each row,
int4, mxfp4 and nf4 with a scale for each group of weights."""

import shutil
from argparse import ArgumentParser
from pathlib import Path

from tune.cli.model_options import add_step
from tune.cli.output import new_folder, served_by
from tune.errors import TuneError
from tune.lookup import local_path


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("model", metavar="MODEL", type=local_path, help="a model folder, an adapter or a run")
    parser.add_argument("--to", required=True, choices=("int8", "int4", "fp8", "mxfp4", "nf4"))
    parser.add_argument("--dynamic", action="store_true", help="int8, fp8: also quantize inputs at run time (W8A8)")
    parser.add_argument("--out", required=True, metavar="FOLDER", type=local_path, help="to write; absent or empty")
    add_step(parser)
    options = parser.parse_args(arguments)
    with new_folder(options.out):
        from tune.peft import open_model

        opened = open_model(options.model, step=options.step, head=None)
        model = opened.on_disk()
        opened.export(
            options.out, f"{opened.title}, in {options.to}, by tune.", opened.compressor(options.to, options.dynamic)
        )
        _open_again(options.out, options.to)
    nf4 = f"transformers, with bitsandbytes: {options.out}"
    print(f"to use it:\n  {nf4 if options.to == 'nf4' else served_by(model, options.out)}")


def _open_again(out: Path, kind: str) -> None:
    """Open the written folder as its users will. If that fails, remove it and raise TuneError."""
    from tune.verify import require_opens

    package = "bitsandbytes" if kind == "nf4" else "compressed_tensors"
    try:
        if not require_opens(out, [package]):
            print(f"note: not opened again: that needs transformers, with its class of this model, and {package}")
    except TuneError:
        shutil.rmtree(out)
        raise

"""Write a model in int8, int4, FP8, MXFP4 or NF4, for vLLM and transformers: MODEL (a model folder, an adapter merged
into its base, a run) with the linear layers of its blocks quantised, by int8 or fp8 with a scale for each row, by int4,
mxfp4 or nf4 with one for each group of weights."""

from argparse import ArgumentParser

from tune.cli.convert import new_folder
from tune.cli.export import add_step, model_at, served_by, write
from tune.errors import TuneError
from tune.lookup import local_path


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("model", metavar="MODEL", type=local_path, help="a model folder, an adapter or a run")
    parser.add_argument("--to", required=True, choices=("int8", "int4", "fp8", "mxfp4", "nf4"))
    parser.add_argument("--dynamic", action="store_true", help="int8, fp8: inputs too, when the model runs (W8A8)")
    parser.add_argument("--out", required=True, metavar="FOLDER", type=local_path, help="to write: absent or empty")
    add_step(parser)
    options = parser.parse_args(arguments)
    with new_folder(options.out), model_at(options.model, options.step) as options.model:
        from tune import peft
        from tune.models import HuggingFaceModel
        from tune.quantization import Compressor, quantised_linears

        found = peft.resolve_model(options.model)
        model, base, tokenizer = peft.open_on_disk(found.base, *found.adapters)
        if isinstance(model, HuggingFaceModel):
            raise TuneError(f"{found.base} is of a family that only transformers has: not quantised here")
        linears = quantised_linears(model)
        columns = {str(base.names[f"{name}.weight"]): each.in_features for name, each in linears.items()}
        what, compressor = f"{found.title}, in {options.to}, by tune.", Compressor(options.to, columns, options.dynamic)
        write(model, tokenizer, options.out, str(found.base), what, base=base, compressor=compressor)
    nf4 = f"transformers, with bitsandbytes: {options.out}"
    print(f"to use it:\n  {nf4 if options.to == 'nf4' else served_by(model, options.out)}")

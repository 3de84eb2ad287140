"""Merge adapters into their base and write the model in Hugging Face layout, one file at a time. Several adapters with
the same layers and rank are first combined into one, as in PEFT.

    tune merge BASE ADAPTER OUT
    tune merge BASE ADAPTER ADAPTER OUT --method ties --weights 0.7 1.3
    tune merge RUN OUT --method average --steps 100 200 300
"""

from argparse import ArgumentParser

from tune.cli.output import new_folder
from tune.errors import TuneError
from tune.lookup import local_path


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("base", metavar="BASE", help="the model that the adapter was trained on; for average, a run")
    parser.add_argument(
        "adapter", metavar="ADAPTER", nargs="*", help="a folder in PEFT layout, or the run that made it"
    )
    parser.add_argument("out", metavar="OUT", type=local_path, help="the folder to write; it must be absent or empty")
    methods = "linear", "ties", "dare_linear", "dare_ties", "average"
    parser.add_argument("--method", choices=methods, help="of combining adapters; average: a run's checkpoints")
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help="checkpoints to average (default: all)")
    parser.add_argument("--weights", type=float, nargs="+", metavar="W", help="weight of each adapter (default: 1)")
    parser.add_argument("--density", type=float, help="fraction of values that ties and dare keep (default: 0.5)")
    parser.add_argument("--seed", type=int, help="seed for dare (default: 0)")
    parser.add_argument("--packed", action="store_true", help="keep unchanged weights of BASE quantized")
    options = parser.parse_args(arguments)
    names = ("method", "weights", "density", "seed")
    combination = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.steps and options.method != "average":
        raise TuneError("--steps names checkpoints to average. Add --method average")
    if options.method == "average":
        if options.adapter or options.packed or len(combination) > 1:
            raise TuneError("--method average only takes RUN, OUT and --steps")
        with new_folder(options.out):
            from tune.peft import average

            average(local_path(options.base), options.out, options.steps)
        return
    if not options.adapter:
        raise TuneError("no adapter is named. Give BASE, ADAPTER and OUT, or RUN, OUT and --method average")
    if (len(options.adapter) > 1) != (options.method is not None) or (combination and not options.method):
        raise TuneError("several adapters need --method; one adapter takes no --method, --weights, --density or --seed")
    if (options.density and options.method == "linear") or (options.seed and "dare" not in str(options.method)):
        raise TuneError(f"--density is for ties and dare, and --seed for dare (got --method {options.method})")
    with new_folder(options.out):
        from tune.peft import adapter_folder, merge

        adapters = [*map(adapter_folder, options.adapter)]
        merge(options.base, adapters, options.out, options.packed, **combination)
    if options.packed:
        from tune.checkpointers import num_packed

        before, kept = num_packed(local_path(options.base)), num_packed(options.out)
        print(f"{kept} of {before} quantized weights are still quantized; {before - kept} are plain now")

"""Run a recipe in one process, or with torchrun, Ray or SLURM. RECIPE is a name from `tune ls`, or your own script (a
path that ends in .py).

    tune run full_finetune model.path=./model dataset.path=./chats.jsonl
    tune run --nproc-per-node 8 my_recipe.py --config my.yaml global_batch_size=128
    tune run --launcher ray --nproc-per-node 8 full_finetune model.path=./model dataset.path=./chats.jsonl
    tune run --launcher slurm --nodes 4 --gpus-per-node 8 --time 24:00:00 full_finetune --config my.yaml

Options before RECIPE go to the launcher: torchrun (`torchrun --help`), ray or slurm (`tune run --launcher ray --help`).
Arguments after it go to the recipe (`tune run RECIPE --help` prints its settings). Without options, the recipe runs in
this process.
"""

from argparse import ArgumentParser

from tune.cli.recipes import run_recipe


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune run [--launcher NAME] [LAUNCHER OPTIONS] RECIPE [--config FILE_OR_NAME] [key=value ...]"
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return
    run_recipe(arguments)

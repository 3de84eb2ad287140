"""The `tune` command: one module per verb, imported only when it is asked for; its docstring is what --help says."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from tune import __version__
from tune.errors import TuneError

VERBS = {
    "ls": "list the recipes and presets",
    "cp": "copy a recipe with its settings, or a config, to change it",
    "cat": "print a recipe or a config",
    "run": "run a recipe, on one process or by torchrun, Ray or SLURM",
    "sweep": "run a recipe for each combination of values, by Ray Tune, and compare",
    "runs": "list run folders: state, step, loss, size",
    "watch": "show a run in the terminal while it goes on",
    "report": "write a page on a run, or on several laid over each other",
    "diff": "in what two runs differ",
    "checkpoints": "list the checkpoints of a run, with their metrics",
    "validate": "tell what is wrong with a run before it starts",
    "preview": "look at the data of a run before it starts",
    "plan": "say what a run needs, how long it takes, and which layout is best",
    "prepare": "tokenise the data of a run ahead of time",
    "generate": "answer prompts with a model, an adapter or a run",
    "chat": "talk to a model in the terminal",
    "download": "get a model from the Hugging Face hub",
    "eval": "evaluate a model on benchmarks, or on data of your own",
    "merge": "merge adapters into their base",
    "export": "write the model of a run as GGUF, for llama.cpp and Ollama, or in Hugging Face layout",
    "quantize": "write a model in int8, int4, FP8, MXFP4 or NF4, for vLLM and transformers",
    "push": "upload a model to the Hugging Face hub",
    "add-tokens": "a model with a larger vocabulary",
    "migrate": "turn a config of torchtune, axolotl, LLaMA-Factory or TRL into settings",
    "convert": "turn a GGUF file or a Llama in Meta's format into a folder in Hugging Face layout",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb. A TuneError ends in its message on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    summaries = "\n".join(f"  {verb:<13} {summary}" for verb, summary in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="tune",
        description="Fine-tune language models with recipes to run, copy and change.",
        usage="tune VERB ...",
        epilog=f"verbs:\n{summaries}\n\n`tune VERB --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help=argparse.SUPPRESS)
    verb = parser.parse_args(arguments[:1] or ["--help"]).verb

    module = importlib.import_module(f"tune.cli.{verb.replace('-', '_')}")
    try:
        parser = argparse.ArgumentParser(f"tune {verb}", description=module.__doc__, allow_abbrev=False)
        if "\n\n" in (module.__doc__ or ""):  # it has command lines
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
        _require_folders(verb, arguments[1:])
        module.main(parser, arguments[1:])
    except TuneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `tune cat NAME | head`
        sys.stderr.close()
    except KeyboardInterrupt:
        sys.exit(130)


def _require_folders(verb: str, arguments: Sequence[str]) -> None:
    if verb in ("runs", "watch", "report", "diff", "checkpoints", "export"):
        for url in (each for each in arguments if "://" in each):
            from tune.config import local_folder

            where = f"what a run with this output_dir writes on its machine is {local_folder(url)}"
            raise TuneError(f"{url}: tune {verb} reads folders; {where}. Give that, or fetch the run first")

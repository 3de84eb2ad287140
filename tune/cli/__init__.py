"""The `tune` command: one module per verb, imported on demand. --help shows its docstring, and the list of verbs shows
its first sentence."""

import argparse
import errno
import gc
import importlib
import io
import re
import sys
from pathlib import Path
from typing import NoReturn

from tune import __version__
from tune.errors import TuneError
from tune.lookup import did_you_mean, quiet_libraries

VERBS = [
    "ls", "cp", "cat", "run", "sweep", "runs", "watch", "report", "diff", "checkpoints", "validate", "preview", "plan",
    "prepare", "cache", "generate", "chat", "download", "eval", "merge", "export", "quantize", "verify", "push",
    "add-tokens", "migrate", "convert",
]  # fmt: skip
# Names that other tools have for verbs.
OTHER_VERBS = {
    **dict.fromkeys(("train", "finetune", "fine-tune"), "run"), "list": "ls", "copy": "cp", "infer": "generate",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser whose error for an unknown option has the known one with the closest name."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        super().error(message + (did_you_mean(unknown[1], self._option_string_actions) if unknown else ""))


def main(arguments: list[str] | None = None) -> None:
    """Run one verb. A TuneError prints its message to stderr and exits with code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that a terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    summaries = "\n".join(f"  {verb:<13} {_summary(verb)}" for verb in VERBS)
    parser = argparse.ArgumentParser(
        prog="tune",
        description="Fine-tune language models with recipes to run, copy and change.",
        usage="tune VERB ...",
        epilog=f"verbs:\n{summaries}\n\nRun `tune VERB --help` for details.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("verb", metavar="VERB", help=argparse.SUPPRESS)
    verb = parser.parse_args(arguments[:1] or ["--help"]).verb
    if verb not in VERBS:
        usual = OTHER_VERBS.get(verb)
        hint = f" Did you mean '{usual}'?" if usual else did_you_mean(verb, VERBS)
        parser.error(f"there is no verb '{verb}'.{hint} The verbs are {', '.join(VERBS)}")

    module = importlib.import_module(f"tune.cli.{verb.replace('-', '_')}")
    try:
        parser = Parser(f"tune {verb}", description=module.__doc__, allow_abbrev=False)
        if "\n\n" in (module.__doc__ or ""):  # keep the line breaks of examples
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
        _require_folders(verb, arguments[1:])
        with quiet_libraries():
            module.main(parser, arguments[1:])
    except TuneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except AttributeError as error:  # from OmegaConf, which is slow to import: a copied recipe lacks a setting
        if type(error).__name__ != "ConfigAttributeError":
            raise
        key = getattr(error, "full_key", "")
        what = f"tune {verb} needs this setting, and the recipe does not have it. Keep its name in a copy"
        print(f"error: {key}: {what}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `tune cat NAME | head`
        sys.stderr.close()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"error: {error.filename}: {error.strerror}. Use another name", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.unfreeze()  # undoes the freeze of `plan`: a process may run several verbs


def _summary(verb: str) -> str:
    """Return the first sentence of a verb's docstring, up to a colon, without importing the module."""
    text = Path(__file__).with_name(f"{verb.replace('-', '_')}.py").read_text(encoding="utf-8")
    first = re.split(r"[.:]\s|\.?\"", text[3:], maxsplit=1)[0]
    return first[0].lower() + " ".join(first.split())[1:]


def _require_folders(verb: str, arguments: list[str]) -> None:
    if verb in ("runs", "watch", "report", "diff", "checkpoints", "export"):
        for url in (each for each in arguments if "://" in each):
            from tune.config import local_folder

            where = f"a run with this output_dir writes to {local_folder(url)} on its machine"
            raise TuneError(f"{url}: tune {verb} reads local folders; {where}. Use that folder, or fetch the run first")

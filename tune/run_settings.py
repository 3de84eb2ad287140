"""Read the settings that a run saved in its folder. The folder may come from another person, so a setting there runs no
code, reads no environment variable and opens no address.

`read_settings` is the only reader of such a file. What is built from the settings is built within `listed_only`.
"""

import glob
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tune.errors import TuneError
from tune.lookup import local_path, refusing

# What the settings of another person may name. All of it only computes: none of it runs code that is named in its
# arguments or sends anything.
LISTED = {
    "tune.checkpointers": ("Checkpointer",),
    "tune.datasets": ("load", "load_prompts", "mix"),
    "tune.evaluation": ("Evaluator",),
    "tune.generation": ("Sampler",),
    "tune.loggers": ("Console", "MLflow", "TensorBoard", "Trackio", "WeightsAndBiases"),
    "tune.losses": (
        "BradleyTerry", "ClippedPolicy", "CPO", "DPO", "ForwardKL", "GSPO", "IPO", "JensenShannon", "KTO",
        "LinearCrossEntropy", "ORPO", "PolicyGradient", "ReverseKL", "SimPO",
    ),
    "tune.models": ("build", "hf"),
    "tune.optimizers": (
        "Adafactor", "constant", "cosine", "inverse_square_root", "linear", "Muon", "warmup_stable_decay",
    ),
    "tune.peft": ("LoRA", "adapter"),
    "tune.tokenizers": ("Tokenizer",),
    "torch.optim": (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    ),
    "torchao.optim": ("AdamW4bit", "AdamW8bit", "AdamWFp8", "Adam4bit", "Adam8bit", "AdamFp8"),
}  # fmt: skip
COMPONENTS = frozenset(f"{package}.{name}" for package, names in LISTED.items() for name in names)

INTERPOLATION = re.compile(r"(\\*)\$\{")  # active after an even number of backslashes


def settings_file(run: Path) -> Path | None:
    """Return the file with the settings of a run's last start, or None."""
    return max(run.glob("config*.yaml"), default=None, key=lambda file: (len(file.name), file.name))


def is_saved(file: Path) -> bool:
    """Whether a run, not a person, has written this file of settings."""
    records = ("run.json", "metrics.jsonl", "log.txt")
    is_named_so = re.fullmatch(r"config(-\d+)?\.yaml", file.name) is not None
    return is_named_so and any((file.parent / name).is_file() for name in records)


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a run folder's `file`. A run saves resolved values.

    Raises:
        TuneError: the file cannot be read, or has an interpolation (`${...}`), which would read environment variables.
    """
    values = read_yaml(file)
    require_resolved(values, file)
    plain: dict[str, Any] = _unescaped(values)
    return plain


def require_resolved(values: dict[str, Any], file: Path) -> None:
    """Raise TuneError if a value in a run folder's `file` has an interpolation."""
    for key, value in leaves(values):
        opened = INTERPOLATION.finditer(value) if isinstance(value, str) else ()
        if any(len(match[1]) % 2 == 0 for match in opened):
            raise TuneError(
                f"{file}: {key}: {value!r} has an interpolation. A run saves resolved values, so this file was edited, "
                "perhaps to read your environment. Replace it by its value if you trust the folder"
            )


def escaped(value: Any) -> Any:
    """Return settings in which each `${` is a plain text, as a YAML file with interpolations writes it."""
    if isinstance(value, dict):
        return {key: escaped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [escaped(each) for each in value]
    return INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _unescaped(value: Any) -> Any:
    """Return settings without the backslashes of `escaped`."""
    if isinstance(value, dict):
        return {key: _unescaped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_unescaped(each) for each in value]
    if isinstance(value, str):
        return INTERPOLATION.sub(lambda match: "\\" * (len(match[1]) // 2) + "${", value)
    return value


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the values in a YAML file, with unresolved interpolations. Raises TuneError."""
    try:
        values = OmegaConf.load(file)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise TuneError(f"{file}{line}: this is not YAML: {error.problem}.") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise TuneError(f"{file}: cannot be read: {str(error).splitlines()[0]}.") from error
    except RecursionError as error:
        raise TuneError(f"{file}: values are nested too deeply.") from error
    if not isinstance(values, DictConfig):
        raise TuneError(f"{file}: must have `key: value` lines at its top level, not a list.")
    if not values:
        raise TuneError(f"{file}: is empty.")
    plain: Any = OmegaConf.to_container(values)
    return plain


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values within groups and lists with their keys: `sources.a.path`, `trackers[0]._component_`."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from leaves(value, f"{prefix}[{index}]")
    else:
        yield prefix, values


def listed_only(
    values: dict[str, Any], file: Path, own: Mapping[str, Any] | None = None
) -> AbstractContextManager[None]:
    """Wrap code that builds components from the settings `values` of a run folder's `file`.

    Within it, a dotted path is only imported if it is one of `COMPONENTS`, or a value of `own`: settings that the user
    has named in this command.

    Raises:
        TuneError: a `_component_` is neither, or `trust_remote_code` is true and not so in `own`.
    """
    of_user = dict(leaves(own or {}))
    names = COMPONENTS | {value for value in of_user.values() if isinstance(value, str)}
    for key, value in leaves(values):
        last = key.rpartition(".")[2]
        if last == "_component_" and value not in names:
            raise TuneError(f"{file}: {key}: {_refused(value)}")
        if last == "trust_remote_code" and value and not of_user.get(key):
            raise TuneError(
                f"{file}: {key} would run code of the checkpoint. If you trust it, name it again: {key}=true"
            )
    return refusing(lambda path: "" if path in names else f"{file}: {_refused(path)}")


def _refused(path: Any) -> str:
    return (
        f"{path} is not one of the components that a run folder may name, since others could run any code. If it is "
        "your own, name it in the command too, or in the YAML of your recipe"
    )


def require_local(path: Any, key: str, file: Path) -> str:
    """Return a path out of a run folder's `file`. Raises TuneError unless it is a file, a folder or a glob here."""
    text = str(path)
    if not isinstance(path, str) or not (local_path(text).exists() or glob.glob(text)):
        raise TuneError(f"{file}: {key}: {text} is not a file or folder here. A run folder may only name local data")
    return text

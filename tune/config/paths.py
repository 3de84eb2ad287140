"""Where the library's recipes and configs are."""

import os
import re
from contextlib import suppress
from pathlib import Path

import tune
from tune.errors import TuneError
from tune.lookup import did_you_mean, local_path


def list_recipes() -> list[str]:
    """Names of the recipes, as `tune run` takes them."""
    return _names("recipes", ".py")


def list_configs() -> list[str]:
    """Names of the configs (each recipe's defaults, and presets), as `--config` takes them."""
    return _names("configs", ".yaml")


def find_recipe(name: str) -> Path:
    """The file of a recipe, given its name or the path of a file."""
    return _find("recipe", name, ".py")


def find_config(name: str) -> Path:
    """The file of a config, given its name or the path of a file."""
    return _find("config", name, ".yaml")


def find_default(recipe: Path, name: str) -> Path:
    """The file of the settings of `recipe`: of its own name next to it, as a copy has it; of the `name` that it gives
    itself, next to it; or one of the library's configs."""
    for beside in (recipe.with_suffix(".yaml"), recipe.with_name(f"{name.removesuffix('.yaml')}.yaml")):
        if beside.is_file():
            return beside
    return find_config(name)


def find_script(config: Path) -> Path | None:
    """The recipe that a file of settings is the default of: one of its name next to it, or one of the library's."""
    for beside in (config.with_suffix(".py"), _folder("recipes") / f"{config.stem}.py"):
        if beside.is_file():
            return beside
    return None


def local_folder(output_dir: str) -> Path:
    """The run folder on this machine; of a URL such as s3://bucket/run that is $TUNE_LOCAL/bucket/run, or
    runs/bucket/run. Raises TuneError for a URL that names none, or nothing that lasts."""
    if "://" not in output_dir:
        return local_path(output_dir)
    if output_dir.startswith("memory://"):
        raise TuneError(f"output_dir: {output_dir} is gone when the process ends. Give a folder, or a store that stays")
    place = re.sub(r"^\w+://([^/]*@)?", "", output_dir).split("?")[0]
    if not (parts := [part for part in place.split("/") if part not in ("", "..")]):
        raise TuneError(f"output_dir: {output_dir} names no folder in its store: add one, {output_dir}runs/mine")
    return Path(os.environ.get("TUNE_LOCAL") or "runs", *parts)


def _folder(kind: str) -> Path:
    package = Path(tune.__file__).parent
    in_wheel = package / f"_{kind}"
    return in_wheel if in_wheel.is_dir() else package.parent / kind


def _names(kind: str, suffix: str) -> list[str]:
    return sorted(file.stem for file in _folder(kind).glob(f"*{suffix}") if not file.name.startswith("_"))


def _find(kind: str, name: str, suffix: str) -> Path:
    path = local_path(name)
    with suppress(OSError):  # a name too long for a file
        if path.is_file():
            return path
    known = _names(f"{kind}s", suffix)
    stem = name.removesuffix(suffix)
    if stem in known:
        return _folder(f"{kind}s") / f"{stem}{suffix}"
    hint = did_you_mean(stem, known)
    raise TuneError(f"there is no {kind} '{name}': neither a file nor one of: {', '.join(known)}.{hint}")

"""Find the library's recipes and configs."""

import os
import re
from contextlib import suppress
from pathlib import Path

import tune
from tune.errors import TuneError
from tune.lookup import did_you_mean, did_you_mean_path, local_path


def list_recipes() -> list[str]:
    """Return the names of the recipes, as `tune run` takes them."""
    return _names("recipes", ".py")


def list_recipes_with_settings() -> list[str]:
    """Return the names of the recipes that have a YAML: all but the plain loop."""
    return [name for name in list_recipes() if name in list_configs()]


def list_configs() -> list[str]:
    """Return the names of the configs (defaults of recipes, and presets), as `--config` takes them."""
    return _names("configs", ".yaml")


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given its name or path."""
    return _find("recipe", name, ".py")


def find_config(name: str) -> Path:
    """Return the file of a config, given its name or path."""
    return _find("config", name, ".yaml")


def find_default(recipe: Path, name: str) -> Path:
    """Return the settings file of `recipe`: the YAML of its name next to it (as for copies), the YAML `name` next to
    it, or one of the library's configs."""
    for beside in (recipe.with_suffix(".yaml"), recipe.with_name(f"{name.removesuffix('.yaml')}.yaml")):
        if beside.is_file():
            return beside
    return find_config(name)


def find_script(config: Path) -> Path | None:
    """Return the recipe with these default settings: the script of its name next to it, or a library recipe."""
    for beside in (config.with_suffix(".py"), _folder("recipes") / f"{config.stem}.py"):
        if beside.is_file():
            return beside
    return None


def is_of_the_library(config: Path) -> bool:
    """Whether a config is one of the library's, not a copy."""
    return config.resolve().parent == _folder("configs").resolve()


def local_folder(output_dir: str) -> Path:
    """Return the run folder on this machine. For a URL such as s3://bucket/run it is $TUNE_LOCAL/bucket/run, or
    runs/bucket/run. Raises TuneError for a URL without a folder, or for a store in memory."""
    if "://" not in output_dir:
        return local_path(output_dir)
    if output_dir.startswith("memory://"):
        raise TuneError(f"output_dir: {output_dir} is lost when the process ends. Use a folder or a persistent store")
    place = re.sub(r"^\w+://([^/]*@)?", "", output_dir).split("?")[0]
    if not (parts := [part for part in place.split("/") if part not in ("", "..")]):
        raise TuneError(
            f"output_dir: {output_dir} names no folder in its store. Add one, such as {output_dir}runs/mine"
        )
    return Path(os.environ.get("TUNE_LOCAL") or "runs", *parts)


def _folder(kind: str) -> Path:
    package = Path(tune.__file__).parent
    in_wheel = package / f"_{kind}"
    return in_wheel if in_wheel.is_dir() else package.parent / kind


def _names(kind: str, suffix: str) -> list[str]:
    return sorted(file.stem for file in _folder(kind).glob(f"*{suffix}") if not file.name.startswith("_"))


def _find(kind: str, name: str, suffix: str) -> Path:
    path, near = local_path(name), ""
    with suppress(OSError):  # a name may be too long for a file
        if path.is_file():
            return path
        near = did_you_mean_path(path, f"*{suffix}") if path.suffix == suffix else ""
    known = _names(f"{kind}s", suffix)
    stem = name.removesuffix(suffix)
    if stem in known:
        return _folder(f"{kind}s") / f"{stem}{suffix}"
    place, hint = "" if path.is_absolute() else f" in {Path.cwd()}", near or did_you_mean(stem, known)
    raise TuneError(f"there is no {kind} '{name}': it is neither a file{place} nor one of: {', '.join(known)}.{hint}")

"""Finding the recipes and configs of the library by name."""

from pathlib import Path

from tune import config
from tune.errors import TuneError
from tune.lookup import did_you_mean


def find(name: str) -> Path:
    """The recipe or config called `name`: `full_finetune` is the recipe, `full_finetune.yaml` its defaults.

    A preset may be named without its suffix where no recipe has that name.
    """
    recipes, configs = config.list_recipes(), config.list_configs()
    if name.removesuffix(".py") in recipes:
        return config.find_recipe(name)
    if name.removesuffix(".yaml") in configs:
        return config.find_config(name)
    names = [*recipes, *(f"{each}.yaml" for each in configs)]
    raise TuneError(f"there is no recipe or config '{name}', but {', '.join(names)}.{did_you_mean(name, names)}")

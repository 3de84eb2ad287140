"""Convert one config of a peer to settings of a recipe."""

import re
from collections.abc import Mapping
from pathlib import Path

from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.migrate import finishing
from tune.migrate.leaves import Leaves, leaves, matches, resolved, text_of
from tune.migrate.migration import Migration, NotConverted, each_name
from tune.migrate.peers import PEERS
from tune.migrate.peers.common import METHODS

LAUNCH = {"compute_environment", "distributed_type", "machine_rank", "mixed_precision", "num_machines", "num_processes"}


def migrate(
    values: Leaves, peer: str, method: str | None, recipes: Mapping[str, Leaves], world_size: int = 1
) -> Migration:
    """Convert a config of `peer` to settings of one of `recipes` (name -> default settings by dotted key).

    Raises:
        NotConverted: no recipe does what the config asks for.
        TuneError: the config's method is unknown.
    """
    theirs, library = dict(leaves(resolved(values))), PEERS[peer]
    if why := library.refused(theirs):
        raise NotConverted(f"{library.name}: {why}")
    method, key = (method, "--method") if method else library.method(theirs)
    settings = settings_of(method, key)
    method = method.lower()
    usual = library.defaults(theirs, method)
    has_adapter = library.has_adapter(usual | theirs)
    recipe = settings["recipe"]
    if recipe == "sft" and library.has_stages(usual | theirs):
        recipe = "pipeline_finetune"
    elif recipe == "sft":
        recipe = "lora_finetune" if has_adapter else "full_finetune"
    referred = set(re.findall(r"\$\{([\w.]+)\}", str(values)))
    run = Migration(peer, library, method, recipe, theirs, referred, recipes[recipe], usual, world_size, has_adapter)
    for name, value in settings.items():
        run.set(name, recipe if name == "recipe" else value, *([key] if key in theirs else []))

    for key, value in theirs.items():
        if value is not None:
            run.read(key, value)
    for key, value in theirs.items():
        if value is None:
            run.read(key, None, is_usual=True)
    for key, value in usual.items():
        if key not in theirs:
            run.read(key, value, is_usual=True)

    finishing.batch(run)
    finishing.passes(run)
    finishing.precision(run)
    finishing.optimizer(run)
    finishing.schedule(run)
    finishing.adapter(run)
    finishing.data(run)
    finishing.length(run)
    finishing.preferences(run)
    finishing.trackers(run)
    return run


def settings_of(method: str, key: str) -> Leaves:
    """Return the settings of a method, which `key` of the config names."""
    for names, settings in METHODS.items():
        if matches(names, method.lower()):
            if isinstance(settings, str):
                raise NotConverted(f"{key}: {method} {settings}")
            return settings
    known = each_name(METHODS)
    raise TuneError(f"{key}: unknown method {method}.{did_you_mean(method, known)} Known: {', '.join(known)}.")


def require_training(values: Leaves, file: Path) -> None:
    """Raise TuneError for a config of `accelerate launch`, which describes devices and no training."""
    if not LAUNCH & values.keys() or any(re.search("model|dataset|learning_rate", key) for key in values):
        return
    raise TuneError(
        f"{file}: this is a config of accelerate launch ({', '.join([*values][:3])}), without settings of a training. "
        f"Only its num_processes matters here. Pass it with the YAML of TRL: tune migrate TRL.yaml "
        f"--world-size {values.get('num_processes') or 'N'}"
    )


def peer_of(values: Leaves, file: Path) -> str:
    """Return the peer whose config this is, judged by its keys. Raises TuneError if no peer's keys match."""
    config = dict(leaves(values))
    if any(line.startswith("tune.") for line in text_of(config, "_component_", "*._component_").splitlines()):
        raise TuneError(f"{file}: this is already a config of tune. Run it: tune run RECIPE --config {file}")
    points = {peer: sum(library.marks(config)) for peer, library in PEERS.items()}
    best = max(points, key=lambda peer: points[peer])
    if points[best] == 0:
        looks = "; ".join(f"{library.name} has {library.looks_like}" for library in PEERS.values())
        raise TuneError(
            f"{file}: cannot recognize the library from the keys ({', '.join([*values][:6])}). Known: {looks}. "
            f"Name the library with --from ({', '.join(PEERS)})."
        )
    return best

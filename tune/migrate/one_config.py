"""A config of a peer as settings of a recipe."""

import re
from collections.abc import Mapping

from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.migrate import rules
from tune.migrate.migration import PEERS, Fields, Migration, NotConverted, first, holds, leaves, names, resolved, table


def migrate(
    values: Fields, peer: str, method: str | None, recipes: Mapping[str, Fields], world_size: int = 1
) -> Migration:
    """The settings for one of `recipes` (name -> its own settings by dotted keys) that a config of `peer` stands for.

    Raises:
        NotConverted: the config is for something that no recipe does.
        TuneError: its method is unknown.
    """
    theirs, lines = dict(leaves(resolved(values))), table(peer)
    for each in lines["refused"]:
        if holds(each["when"], theirs):
            raise NotConverted(f"{PEERS[peer]}: {each['says']}")
    line = next(each for each in lines["method"] if holds(each.get("when", {}), theirs))
    source = "--method" if method else line.get("key") or next(iter(line.get("when", {})), "method")
    given = str(method or (theirs[line["key"]] if "key" in line else line["is"]))
    word, found = first(table("common")["methods"], given.lower())
    if word is None:
        known = [name for each in table("common")["methods"] for name in names(each)]
        raise TuneError(f"{source}: {given} is no method.{did_you_mean(given, known)} There are: {', '.join(known)}.")
    if isinstance(found, str):
        raise NotConverted(f"{source}: {given} {found}")
    facts = {"method": given, **theirs}
    usual = {k: v for each in lines["defaults"] if holds(each["when"], facts) for k, v in each["are"].items()}
    has_adapter = holds(lines["adapter"], usual | theirs)
    name = found["recipe"]
    if name == "sft" and "stages" in lines and holds(lines["stages"], usual | theirs):
        name = "pipeline_finetune"
    elif name == "sft":
        name = "lora_finetune" if has_adapter else "full_finetune"
    referred = set(re.findall(r"\$\{([\w.]+)\}", str(values)))
    run = Migration(peer, given, name, theirs, referred, recipes[name], usual, world_size, has_adapter, vars(rules))
    for key, value in found.items():
        run.set(key, name if key == "recipe" else value, *([source] if source in theirs else []))
    for key, value in theirs.items():
        if value is not None:
            run.read(key, value)
    for key in [key for key, value in theirs.items() if value is None]:
        run.read(key, None, implied=True)  # the peer's default
    for key in [key for key in usual if key not in theirs]:
        run.read(key, usual[key], implied=True)
    for finish in rules.FINISH:
        finish(run)
    return run

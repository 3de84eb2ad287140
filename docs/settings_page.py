"""Write docs/settings.md from configs/*.yaml and the signatures of their components: `python docs/settings_page.py`.

A test compares the page with what this gives.
"""

import re
from pathlib import Path

from tune import config
from tune.cli.ls import others
from tune.types import show

PAGE = Path(__file__).with_name("settings.md")
SETTING = re.compile(r"^( *)([\w-]+):(?: +(?!#)(.*?))?(?: +# (.*))?$")
HEADER = """# Settings

Every setting of every recipe, with its default. Change one on the command line (`key=value`, nested keys with dots) or
in a file: `--config FILE.yaml`. `tune ls RECIPE` prints the same for one recipe. `???` marks a required setting; `null`
means off, or chosen for you. A setting that ends in `_component_` names a function or class, and a group without one
goes to a function. Both also accept [other arguments](#other-arguments).

This page is generated from `configs/` by `python docs/settings_page.py`.
"""


def settings_of(text: str) -> dict[str, tuple[str, str]]:
    """Dotted key -> (default, comment) of a config in the layout of configs/: one setting a line."""
    settings, path = {}, list[str]()
    for line in text.splitlines():
        match = SETTING.match(line)
        if not match:
            continue
        indent, key, value, comment = match.groups()
        path = [*path[: len(indent) // 2], key]
        if value is not None or comment:
            settings[".".join(path)] = (value or "", comment or "")
    return settings


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def table_of(recipes: dict[str, dict[str, tuple[str, str]]]) -> list[str]:
    """A table per top-level group, a line for each default and meaning that a setting has."""
    lines: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for recipe, settings in recipes.items():
        for key, (value, comment) in settings.items():
            rows = lines.setdefault(key.partition(".")[0], {})
            rows.setdefault((key, value, comment), []).append(recipe)
    plain = {group: rows for group, rows in lines.items() if all("." not in key for key, _, _ in rows)}
    tables = {"Top level": {row: names for rows in plain.values() for row, names in rows.items()}}
    tables |= {f"`{group}`": rows for group, rows in lines.items() if group not in plain}
    text = []
    for title, rows in tables.items():
        text += ["", f"## {title}", "", "| setting | default | what it does | recipes |", "|---|---|---|---|"]
        for (key, value, comment), names in sorted(rows.items(), key=lambda row: row[0][0]):
            used_by = {frozenset(recipes): "all", frozenset(recipes) - {"evaluate"}: "all that train"}
            where = used_by.get(frozenset(names), ", ".join(names))
            default = f"`{cell(value)}`" if value else ""
            text.append(f"| `{key}` | {default} | {cell(comment)} | {where} |")
    return text


def other_arguments() -> list[str]:
    """For each component or function that a group goes to, the arguments that no YAML lists."""
    arguments: dict[tuple[str, str], dict[str, str]] = {}
    for name in config.list_recipes_with_settings():
        for key, (path, more) in others(config.find_config(name)).items():
            arguments.setdefault((key, path), {}).update({key: show(value) for key, value in more.items()})
    text = ["", "## Other arguments", ""]
    text += [
        "Accepted by every recipe that passes the group to this component or function, as `group.argument=value`. The",
        "docstrings in the reference describe them.",
        "",
        "| group | goes to | arguments and defaults |",
        "|---|---|---|",
    ]
    for (key, path), more in sorted(arguments.items()):
        text.append(f"| `{key}` | `{path}` | {', '.join(f'`{name}={cell(value)}`' for name, value in more.items())} |")
    return text


def page() -> str:
    recipes = {
        name: settings_of(config.find_config(name).read_text(encoding="utf-8"))
        for name in config.list_recipes_with_settings()
    }
    return "\n".join([HEADER.rstrip("\n"), *table_of(recipes), *other_arguments()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""What the site has beyond the pages of docs/ (see mkdocs.yml).

Files elsewhere in the repository that a page links to become pages, so the same links work on the site and in the
repository. Each package of `tune` gets a page of reference from its docstrings. A public name or module without a
docstring is a warning, and `mkdocs build --strict` fails on warnings.
"""

import ast
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tests use what is below without mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


def on_config(config: "MkDocsConfig") -> None:
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    reference.append({"Python API": [{name: f"reference/{name}.md"} for name in packages()]})


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    from mkdocs.structure.files import File

    for name in undocumented():
        logging.getLogger("mkdocs.docstrings").warning("%s has no docstring", name)
    for name in packages():
        members = ", ".join(public(ROOT.joinpath(*name.split("."), "__init__.py")))
        content = f"# {name}\n\n::: {name}\n    options:\n      members: [{members}]\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    pages = sorted((ROOT / "docs").rglob("*.md"))
    for page in pages:  # grows while it is read: linked pages have links too
        for target in filter(is_outside, linked(page)):
            if files.get_file_from_path(uri(target)):
                continue
            text = target.read_text(encoding="utf-8")
            if target.suffix in (".md", ".ipynb"):
                pages.append(target)
            if target.suffix == ".ipynb":
                text = cells(text)
            elif target.suffix != ".md":
                text = f"# {target.relative_to(ROOT)}\n\n~~~~ {{.{target.suffix[1:] or 'text'}}}\n{text}\n~~~~\n"
            files.append(File.generated(config, uri(target), content=text))


def on_page_markdown(markdown: str, page: "Page", **_: object) -> str:
    """Links that lead out of docs/, or come from outside, as links between pages."""
    here = page.file.src_uri
    folder = ROOT / (here.removeprefix("repository/") if here.startswith("repository/") else f"docs/{here}")

    def on_site(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder.parent / link[1]))
        if not target.is_file() or not (is_outside(folder) or is_outside(target)):
            return link[1]
        return os.path.relpath(uri(target), os.path.dirname(here))

    return LINK.sub(on_site, markdown)


def cells(notebook: str) -> str:
    """The cells of a Jupyter notebook as Markdown."""
    texts = {"markdown": "{}\n", "code": "```python\n{}\n```\n"}
    return "\n".join(texts[cell["cell_type"]].format("".join(cell["source"])) for cell in json.loads(notebook)["cells"])


def linked(page: Path) -> list[Path]:
    """The files that a page links to."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    targets = [Path(os.path.normpath(page.parent / link)) for link in links]
    return [target for target in targets if target.is_file()]


def is_outside(path: Path) -> bool:
    return ROOT / "docs" not in path.parents


def uri(path: Path) -> str:
    """Where a file of the repository is on the site."""
    if not is_outside(path):
        return str(path.relative_to(ROOT / "docs"))
    return f"repository/{path.relative_to(ROOT)}" + ("" if path.suffix == ".md" else ".md")


def packages() -> list[str]:
    """The packages of `tune` that have something public."""
    return [f"tune.{face.parent.name}" for face in sorted((ROOT / "tune").glob("*/__init__.py")) if public(face)]


def public(face: Path) -> list[str]:
    """What is public of a package: what its `__init__.py` lists in `__all__`; without it, what it imports from its own
    modules, or defines."""
    names: list[str] = []
    for statement in ast.parse(face.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=listed):
                return sorted(ast.literal_eval(listed))
            case ast.ImportFrom(module=str(module)) if f".{face.parent.name}." in f".{module}":
                names += [alias.name for alias in statement.names]
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if not name.startswith("_"):
                names.append(name)
    return sorted(names)


def undocumented(package: Path = ROOT / "tune") -> Iterator[str]:
    """The modules, and what is public of each package, that have no docstring of their own. That of a constant is the
    string behind its assignment."""
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        module = ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        if tree.body and not ast.get_docstring(tree):
            yield module
        if file.name == "__init__.py" and package in (file.parent, file.parent.parent):
            root = package.parent
            yield from (f"{module}.{name}" for name in public(file) if not documented(file, name, root))


def documented(file: Path, name: str, root: Path) -> bool:
    """Whether what a file below `root` defines or imports as `name` has a docstring."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for statement, behind in zip(body, [*body[1:], None], strict=True):
        match statement:
            case ast.ClassDef(name=defined) | ast.FunctionDef(name=defined) if defined == name:
                return ast.get_docstring(statement) is not None
            case ast.Assign(targets=[ast.Name(id=defined)]) if defined == name:
                return isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            case ast.ImportFrom(module=str(module)) if name in {alias.name for alias in statement.names}:
                origin = root.joinpath(*module.split("."))
                return documented(origin / "__init__.py" if origin.is_dir() else origin.with_suffix(".py"), name, root)
    raise LookupError(f"{file}: {name} is neither defined nor imported there")

"""Download a model from the Hugging Face Hub. Run it again to continue an interrupted download. Gated and private
models need a login (`hf auth login`) or HF_TOKEN."""

from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tune.cli.hub import hub
from tune.errors import TuneError
from tune.lookup import local_path

SUFFIXES = {".json", ".jinja", ".model", ".tiktoken", ".txt", ".safetensors"}
OLD_WEIGHTS = {".bin", ".pt", ".pth"}


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("hub_id", metavar="HUB_ID", help="such as Qwen/Qwen3-0.6B")
    parser.add_argument("--revision", help="a branch, tag or commit (default: the main branch)")
    parser.add_argument("--out", type=local_path, help="the folder to write (default: the last part of HUB_ID)")
    options = parser.parse_args(arguments)
    hub_id, revision = options.hub_id, options.revision
    out = options.out or Path(hub_id.rpartition("/")[2])
    from tune.checkpointers import HUB_ID

    with hub(hub_id, revision) as huggingface_hub:
        model = huggingface_hub.HfApi().model_info(hub_id, revision=revision)
        require_its_own(out, model.id)
        (out / HUB_ID).parent.mkdir(parents=True, exist_ok=True)
        (out / HUB_ID).write_text(model.id, encoding="utf-8")  # for model cards of models trained from it
        for file in wanted(sibling.rfilename for sibling in model.siblings):
            huggingface_hub.hf_hub_download(hub_id, file, revision=model.sha, local_dir=out)  # skips complete files
    print(f"wrote {out}")


def require_its_own(out: Path, hub_id: str) -> None:
    """Raise TuneError if `out` holds anything but this Hub model or a part of it."""
    from tune.checkpointers import HUB_ID

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    is_download = (out / HUB_ID).is_file()
    if is_download and (there := (out / HUB_ID).read_text(encoding="utf-8").strip()) == hub_id:
        return
    what = f"is a download of {there}" if is_download else "already exists and was not written by `tune download`"
    raise TuneError(f"{out} {what}: files of {hub_id} would replace its files. Name another folder with --out")


def wanted(files: Iterable[str]) -> list[str]:
    """Return the top-level files that training needs; weights in older formats only if there are no safetensors."""
    paths = [PurePosixPath(file) for file in files if "/" not in file]
    has_safetensors = any(path.suffix == ".safetensors" for path in paths)
    suffixes = SUFFIXES if has_safetensors else SUFFIXES | OLD_WEIGHTS
    return [path.name for path in paths if path.suffix in suffixes]

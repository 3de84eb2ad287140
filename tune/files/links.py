"""Links in a folder that another person may have made."""

from pathlib import Path

from tune.errors import TuneError


def require_inside(file: Path) -> Path:
    """Return `file`. Raises TuneError if it links to a file outside of its folder: a copy of it could publish any file
    of this machine. Links of huggingface_hub's cache, from snapshots/ to blobs/, are allowed."""
    folder, target = file.parent.resolve(), file.resolve()
    blobs = folder.parent.parent / "blobs"
    is_of_cache = target.parent == blobs and folder.parent.name == "snapshots"
    if file.is_symlink() and not target.is_relative_to(folder) and not is_of_cache:
        raise TuneError(
            f"{file} is a link to {target}, outside of its folder. Replace it by a copy if it belongs there"
        )
    return file

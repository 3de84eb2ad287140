from pathlib import Path

import pytest

from tune.errors import TuneError
from tune.files import require_inside


def link(place: Path, to: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(to)
    return place


def test_links_out_of_a_folder(tmp_path: Path) -> None:
    """Links inside of it, and those of huggingface_hub's cache, are allowed."""
    secret = tmp_path / "home" / "key"
    secret.parent.mkdir()
    secret.write_text("secret")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blob = tmp_path / "models--a--b" / "blobs" / "beef"
    blob.parent.mkdir(parents=True)
    blob.write_text("{}")
    assert require_inside(link(snapshot / "config.json", Path("../../blobs/beef"))).read_text() == "{}"
    assert require_inside(link(snapshot / "other.json", Path("config.json"))).name == "other.json"
    with pytest.raises(TuneError, match=r"config\.json is a link to .*home/key"):
        require_inside(link(tmp_path / "model" / "config.json", secret))
    with pytest.raises(TuneError, match="home/key"):
        require_inside(link(snapshot / "secret.json", secret))


def test_blobs_that_are_a_link(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").write_text("secret")
    link(tmp_path / "models--a--b" / "blobs", tmp_path / "home")
    with pytest.raises(TuneError, match="home/key"):
        require_inside(link(tmp_path / "models--a--b" / "snapshots" / "0" / "a.json", Path("../../blobs/key")))

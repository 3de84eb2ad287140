"""Upload a model and its card to the Hugging Face Hub: the result of a run (its model/, or else its adapter/), or a
folder that `tune export`, `merge` or `quantize` wrote. Log in first (`hf auth login`), or set HF_TOKEN."""

from argparse import ArgumentParser
from pathlib import Path

from tune.errors import TuneError, explained
from tune.files import INDEX, require_inside
from tune.lookup import local_path, needs
from tune.terminal import visible


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("source", metavar="RUN_OR_FOLDER", type=local_path, help="a run, a model folder, or an adapter")
    parser.add_argument("repo", metavar="REPO", help="OWNER/NAME; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--token-file", metavar="FILE", type=local_path, help="a file with the token")
    options = parser.parse_args(arguments)
    print(f"uploaded to {push(options.source, options.repo, options.private, options.token_file)}")


def push(source: Path, repo: str, private: bool = False, token_file: Path | None = None) -> str:
    """Upload the top-level files of a folder in one commit. Returns the URL. Raises TuneError."""
    with needs("hf", "`tune push`"):
        import huggingface_hub
        from huggingface_hub import errors
        from huggingface_hub.utils import validate_repo_id
    from tune.checkpointers import has_weights
    from tune.files import is_adapter
    from tune.models import read_json
    from tune.peft import CONFIG, exported_folder

    wrong = f"'{repo}' is not a repository name. Use OWNER/NAME with letters, digits and - _ ."
    with explained(wrong, errors.HFValidationError):
        validate_repo_id(repo)
    folder = exported_folder(source)
    if not has_weights(folder):
        raise TuneError(f"{folder} has no weights (*.safetensors) to upload")
    if is_adapter(folder):
        base = read_json(folder / CONFIG, "adapter").get("base_model_name_or_path") or ""
        if Path(base).exists():
            print(visible(f"note: {CONFIG} names {base} as base, which others do not have. Replace it with the Hub id"))
    for file in folder.iterdir():
        require_inside(file)
    card = folder / "README.md"
    if not card.is_file() or not card.read_text(encoding="utf-8").strip():
        raise TuneError(f"{folder} has no model card. Write {card}, with the model's base, data and method")
    with explained(f"--token-file {token_file} cannot be read", OSError, ValueError):
        token = token_file.read_text(encoding="utf-8").strip() if token_file else huggingface_hub.get_token()
    if not token:
        raise TuneError("you are not logged in to the Hub. Run `hf auth login`, set HF_TOKEN, or add --token-file")
    try:
        hub = huggingface_hub.HfApi(token=token)
        name = hub.create_repo(repo, private=private or None, exist_ok=True).repo_id
        hub.upload_folder(
            repo_id=name, folder_path=folder, allow_patterns=[file.name for file in folder.iterdir() if file.is_file()],
            ignore_patterns=[".*", INDEX], commit_message="Upload by tune push",
        )  # fmt: skip
    except (errors.HTTPError, errors.OfflineModeIsEnabled, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403) or isinstance(error, errors.RepositoryNotFoundError):
            raise TuneError(f"this login may not write to {repo}. Check the owner and the token") from error
        said = str(error).replace(token, "***")
        raise TuneError(f"the upload to {repo} failed ({said}). Check the network and run it again") from error
    return f"{hub.endpoint}/{name}"

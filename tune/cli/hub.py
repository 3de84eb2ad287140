"""Access to the Hugging Face Hub, for the verbs that need it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tune.errors import TuneError
from tune.lookup import needs


@contextmanager
def hub(hub_id: str, revision: str | None = None) -> Iterator[Any]:
    """Yield the module `huggingface_hub`. Its errors about `hub_id` become TuneErrors."""
    with needs("hf", "the Hugging Face Hub"):
        import huggingface_hub
        from huggingface_hub import errors

    login = "log in with `hf auth login` or set HF_TOKEN"
    explanations = {
        errors.HFValidationError: f"'{hub_id}' is not a valid model id, such as Qwen/Qwen3-0.6B.",
        errors.GatedRepoError: f"{hub_id} is gated: accept the terms on its page, then {login}.",
        errors.RevisionNotFoundError: f"{hub_id} has no revision '{revision}'.",
        errors.RepositoryNotFoundError: f"{hub_id} is not on the Hub, or is private: check the name, or {login}.",
    }
    try:
        yield huggingface_hub
    except tuple(explanations) as error:
        raise TuneError(next(text for kind, text in explanations.items() if isinstance(error, kind))) from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise TuneError(
            f"the request to the Hub for {hub_id} failed ({error}). Check the network and run the same command again: "
            "downloaded files are kept."
        ) from error

"""The Hugging Face hub, for the verbs that ask it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tune.errors import TuneError
from tune.lookup import needs


@contextmanager
def hub(hub_id: str, revision: str | None = None) -> Iterator[Any]:
    """The module `huggingface_hub`. What it raises of `hub_id` becomes a TuneError."""
    with needs("hf", "what is on the hub"):
        import huggingface_hub
        from huggingface_hub import errors

    login = "log in with `hf auth login` or set HF_TOKEN"
    explanations = {
        errors.HFValidationError: f"'{hub_id}' is not the name of a model on the hub, such as Qwen/Qwen3-0.6B.",
        errors.GatedRepoError: f"{hub_id} is gated: accept its terms on its page, then {login}.",
        errors.RevisionNotFoundError: f"{hub_id} has no revision '{revision}'.",
        errors.RepositoryNotFoundError: f"{hub_id} is not on the hub, or is private: check the name, or {login}.",
    }
    try:
        yield huggingface_hub
    except tuple(explanations) as error:
        raise TuneError(next(text for kind, text in explanations.items() if isinstance(error, kind))) from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise TuneError(
            f"the hub did not answer as it should for {hub_id} ({error}). Check the network and run the same "
            "command again: what has arrived is kept."
        ) from error

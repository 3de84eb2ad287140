"""The one exception for mistakes that the user can mend."""

from collections.abc import Iterator
from contextlib import contextmanager

from tune.secrets import without_secrets


class TuneError(Exception):
    """A mistake the user can mend. The message says what is wrong, where, what was found and what to do."""

    def __init__(self, message: str):
        super().__init__(without_secrets(message))


@contextmanager
def explained(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Around what the user can get wrong: an error of these kinds (default: a TuneError) becomes a TuneError that says
    `what` is wrong before the error's own words. `Exception` stands for whatever others' code may raise: the error's
    type is told too, and TuneErrors pass as they are."""
    kinds = kinds or (TuneError,)
    try:
        yield
    except kinds as error:
        if Exception in kinds and isinstance(error, TuneError):
            raise
        kind = f"{type(error).__name__}: " if Exception in kinds else ""
        raise TuneError(f"{what}: {kind}{error}") from error

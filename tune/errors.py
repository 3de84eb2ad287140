"""The exception for mistakes that the user can fix."""

from collections.abc import Iterator
from contextlib import contextmanager

from tune.secrets import without_secrets
from tune.terminal import visible


class TuneError(Exception):
    """A mistake that the user can fix. The message says what is wrong, where, what was found and what to do."""

    def __init__(self, message: str):
        super().__init__(visible(without_secrets(message)))


@contextmanager
def explained(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds (default: TuneError) into a TuneError whose message begins with `what`.

    Use `Exception` for code of others, which may raise anything: the message then includes the error's type, and
    TuneErrors pass unchanged.
    """
    kinds = kinds or (TuneError,)
    try:
        yield
    except kinds as error:
        if Exception in kinds and isinstance(error, TuneError):
            raise
        kind = f"{type(error).__name__}: " if Exception in kinds else ""
        raise TuneError(f"{what}: {kind}{error}") from error

"""The one exception for mistakes that the user can mend."""

from tune.secrets import without_secrets


class TuneError(Exception):
    """A mistake the user can mend. The message says what is wrong, where, what was found and what to do."""

    def __init__(self, message: str):
        super().__init__(without_secrets(message))

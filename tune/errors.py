"""The one exception for mistakes that the user can mend."""


class TuneError(Exception):
    """A mistake the user can mend. The message says what is wrong, where, what was found and what to do."""

import pytest

from tune.errors import TuneError, explained


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        ((), TuneError("b"), "a: b"),
        ((ValueError, OSError), UnicodeError("b"), "a: b"),
        ((Exception,), KeyError("b"), "a: KeyError: 'b'"),
        ((Exception,), TuneError("b"), "b"),
    ],
)
def test_errors_are_explained(kinds: tuple, error: Exception, message: str) -> None:
    with pytest.raises(TuneError) as caught, explained("a", *kinds):
        raise error
    assert str(caught.value) == message


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(KeyError), explained("a", ValueError):
        raise KeyError("b")

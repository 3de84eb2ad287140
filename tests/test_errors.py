import pytest

from tune.errors import TuneError, explained


@pytest.mark.parametrize(
    ("kinds", "error", "told"),
    [
        ((), TuneError("b"), "a: b"),
        ((ValueError, OSError), UnicodeError("b"), "a: b"),
        ((Exception,), KeyError("b"), "a: KeyError: 'b'"),
        ((Exception,), TuneError("b"), "b"),
    ],
)
def test_errors_are_explained(kinds: tuple, error: Exception, told: str) -> None:
    with pytest.raises(TuneError) as found, explained("a", *kinds):
        raise error
    assert str(found.value) == told


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), explained("a", ValueError):
        raise KeyError("b")

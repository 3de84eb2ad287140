"""Data to validate on, named next to the training data."""

from collections.abc import Callable, Mapping
from typing import Any

from tune.errors import TuneError
from tune.lookup import did_you_mean

OF_TRAINING = ("take", "streaming", "shuffle_buffer")  # arguments that the validation data do not inherit
SHARED = (  # arguments that cannot differ; rows that validation data hold out again would be used for nothing
    *("tokenizer", "kind", "max_seq_len", "max_prompt_len", "packed", "validation_fraction", "validation_seed"),
)


def with_validation(load: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return `load(**arguments)` with the data that its argument `validation` names in the attribute `validation`.

    `validation` is a path, or a mapping of the arguments that differ from those of the training data.
    """
    training = {name: value for name, value in arguments.items() if name != "validation"}
    validation = arguments["validation"]
    if training.get("validation_fraction"):
        raise TuneError(
            f"validation_fraction: its rows would not be used, because validation={validation} already names the "
            "validation data. Leave one of them out"
        )
    differing = {"path": validation} if isinstance(validation, str) else dict(validation)
    known = [name for name in training if name not in SHARED]
    if unknown := sorted(differing.keys() - {*known}):
        raise TuneError(
            f"validation.{unknown[0]}: is not an argument that can differ in the validation data."
            f"{did_you_mean(unknown[0], known)}"
        )
    dataset = load(**training)
    inherited = {name: value for name, value in training.items() if name not in OF_TRAINING}
    try:
        dataset.validation = load(**inherited | differing)
    except TuneError as error:
        is_of_argument = str(error).partition(":")[0] in arguments
        raise TuneError(f"validation{'.' if is_of_argument else ': '}{error}") from error
    return dataset

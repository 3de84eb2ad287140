"""What is wrong with a run, before it starts. A check is the function that the run itself calls; a rule goes to
`tune.rules`."""

from tune.validate.checks import validate

# Other names are for the packages of `tune` alone.
__all__ = [
    "validate",
]

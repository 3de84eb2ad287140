"""`python -m tune.cli` is `tune`."""

from tune.cli import main

main()

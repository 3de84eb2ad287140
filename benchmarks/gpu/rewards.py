def different_letters(row: dict, completion: str) -> float:
    """A reward that differs between the completions of a random model."""
    return len(set(completion)) % 7

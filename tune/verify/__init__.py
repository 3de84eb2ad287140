"""Verify that an exported file or folder computes the same as the model of a run. The program that people will open it
with (`open_program`) reads the texts of a few `Probe`s, and `compare` compares its results with the run's own model.

- `probes.py`: the questions for both
- `programs.py`: transformers, PEFT and vLLM; `llama_cpp.py`: llama.cpp, in a separate process
- `comparison.py`: the checks of its results, each a row of a table with a tolerance
- `settings.py`: the checks of its settings
"""

from tune.verify.comparison import Check, ask, compare
from tune.verify.llama_cpp import LlamaCpp
from tune.verify.probes import Probe, conversations, probes_of_data, probes_of_prompts, probes_of_texts
from tune.verify.programs import computed_in, open_program, require_opens, type_of
from tune.verify.settings import compare_settings

# Other names are internal to `tune`.
__all__ = [
    "Check",
    "LlamaCpp",
    "Probe",
    "ask",
    "compare",
    "compare_settings",
    "computed_in",
    "conversations",
    "open_program",
    "probes_of_data",
    "probes_of_prompts",
    "probes_of_texts",
    "require_opens",
    "type_of",
]

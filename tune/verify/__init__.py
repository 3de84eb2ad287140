"""Whether a file or folder for others computes what the model of a run computes: `compare` has the program that people
will open it with (`open_program`) read the texts of a few `Probe`s, and our own model judge what that makes of them.

- `probes.py`: what both are asked
- `programs.py`: transformers, PEFT and vLLM; `llama_cpp.py`: llama.cpp, in a process of its own
- `comparison.py`: the checks, each a row of a table with its tolerance
"""

from tune.verify.comparison import Check, ask, compare
from tune.verify.llama_cpp import LlamaCpp
from tune.verify.probes import Probe, conversations, probes_of_data, probes_of_prompts, probes_of_texts
from tune.verify.programs import computed_in, open_program, type_of

# Other names are for the packages of `tune` alone.
__all__ = [
    "Check",
    "LlamaCpp",
    "Probe",
    "ask",
    "compare",
    "computed_in",
    "conversations",
    "open_program",
    "probes_of_data",
    "probes_of_prompts",
    "probes_of_texts",
    "type_of",
]

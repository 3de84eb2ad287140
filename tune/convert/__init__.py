"""Convert models of other formats to Hugging Face layout, and export to GGUF."""

from tune.convert.from_gguf import import_gguf
from tune.convert.from_meta import import_meta
from tune.convert.lora_to_gguf import export_gguf_lora
from tune.convert.to_gguf import export_gguf, metadata_of, notes_of

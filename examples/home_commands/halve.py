"""A model of every second block of another, as a student that knows something: halve.py MODEL OUT.

Both are folders in Hugging Face layout.
"""

import json
import re
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from tune.tokenizers import Tokenizer

LAYER = re.compile(r"(?<=\blayers\.)\d+")

folder, out = map(Path, sys.argv[1:])
Tokenizer(str(folder)).save(out)
config = json.loads((folder / "config.json").read_text())
tensors = {}
for file in folder.glob("*.safetensors"):
    for name, tensor in load_file(file).items():
        layer = LAYER.search(name)
        if layer is None or int(layer[0]) % 2 == 0:
            tensors[LAYER.sub(lambda number: str(int(number[0]) // 2), name)] = tensor
save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
config["num_hidden_layers"] = (config["num_hidden_layers"] + 1) // 2
(out / "config.json").write_text(json.dumps(config, indent=2) + "\n")

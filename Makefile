# Two commands matter: `make serve` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
CLIENTS := $(VENV)/.clients
SHELL   := /bin/bash
# Of pip's output, what is fetched: the largest libraries take minutes.
FETCHED := sed -nu -e /metadata/d -e 's,^ *Downloading \(.*/\)*\([^/]*\)$$,  \2,p' -e 's/^Installing collected packages.*/  installing …/p'
# Two workers take whole files, so that each file sets up its model or server once. Bytecode is written even where the
# environment forbids it: tests start many processes, which would all compile the sources again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install serve chat test pytest test-all lint style imports typecheck format bench options-page models-page speed-picture docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP) $(KERNELS)  ## create .venv with chairlift and the development tools, and compile the CPU kernels

# The first start compiles them if this fails. Tests compile theirs beside other work, so they do not wait for it.
$(KERNELS): $(STAMP) $(shell find src/chairlift/kernels/cpu -name '*.py')
	-@$(BIN)/python -m chairlift compile --device cpu
	@touch $@
	@echo "Installed. Next: ./chairlift serve, or: source $(BIN)/activate, after which the command is chairlift."

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " \
		+ sys.version.split()[0] + "; name another: make install PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || \
		{ $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@echo "Fetching the libraries into $(VENV): some minutes and about 3 GB of disk (about 8 with the build of torch for GPUs)."
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' | $(FETCHED)
	@# Triton's interpreter tests the GPU kernels. No dependencies: they would replace the CPU build of torch.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.6.0
	@touch $@

serve: install  ## fetch the default model and serve it on 127.0.0.1:8000
	$(BIN)/chairlift serve

chat: install  ## talk to the default model in the terminal
	$(BIN)/chairlift chat

# Imports and types are checked beside the tests, which wait for servers and other processes a fifth of their time.
test: $(STAMP) style  ## run what CI runs: style, types and tests
	$(MAKE) --no-print-directory -j 3 imports typecheck pytest

pytest: $(STAMP)
	$(PYTEST)

$(CLIENTS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,clients,ray-data]'
	@# aiperf pins versions that other tools do not work with.
	$(BIN)/python -m venv --without-pip $(VENV)/aiperf
	$(BIN)/python -m pip --python $(VENV)/aiperf/bin/python install --quiet --disable-pip-version-check 'aiperf>=0.13'
	@touch $@

test-all: $(STAMP) $(CLIENTS) lint typecheck  ## also run the slow tests and those of client libraries
	HYPOTHESIS_PROFILE=searching $(PYTEST) -m ''

lint: style imports

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

imports: $(STAMP)
	$(BIN)/lint-imports

typecheck: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)  ## fix style and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## output tokens/s, beside one-at-a-time and transformers
	$(BIN)/chairlift bench throughput

options-page: $(STAMP)  ## write docs/options.md and the types of keywords
	$(BIN)/python -m chairlift.cli.options_page docs/options.md src/chairlift/engine_keywords.py

models-page: $(STAMP)  ## write docs/models.md from docs/models.json
	$(BIN)/python -m chairlift_lab.report.models_page docs/models.json > docs/models.md

speed-picture: install  ## draw docs/images/speed.png from docs/results
	$(BIN)/python -m chairlift_lab.report.speed_picture docs

docs: install  ## build the documentation as a site, build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "The site is in build/site. To read it with its search: $(BIN)/python -m http.server -d build/site 8080"

clean:
	rm -rf $(VENV) build dist src/*.egg-info

# The two commands to know are `make demo` and `make test`. Both create the environment first, if it does not exist.
PYTHON ?= python3
VENV := .venv
EXTRAS ?= dev
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# As a variable, and not by -c, the lock holds for what builds this package too.
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test slow lint docs clean

demo: $(STAMP)
	$(BIN)/penstock run examples/demo.toml

test: $(STAMP)
	$(BIN)/pytest -n auto --dist worksteal

slow: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(STAMP)
	$(PIP) -e '.[docs]'
	$(BIN)/mkdocs build --strict

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), which takes a minute or two ..."
	$(PIP) -e '.[$(EXTRAS)]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build site src/*.egg-info

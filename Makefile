# Two commands: `make sweep` (the main job, at the offline scale) and `make test`.
# Both first make .venv with the pinned dependencies; PYTHON=python3.12 chooses another Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: sweep test test-slow lint clean

sweep: $(VENV)/ready
	$(BIN)/python sweeps/dfrost_eps.py $(ARGS)

test: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile $(ARGS)

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/ready
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else \
	"Python %d.%d: need 3.10 to 3.13 (choose one with make PYTHON=python3.12 ...)" % v)'
	@echo "installing into $(VENV) (several GB with torch; minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

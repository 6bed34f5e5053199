# `make` sets up .venv and runs the demo; `make test` sets up and runs the tests. Nothing needs to be activated,
# and Python's ensurepip (which Debian packages apart) is not needed: the system's pip fills the environment.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.docs
INSTALL = $(PYTHON) -m pip --python $(BIN)/python install -qq --no-compile --disable-pip-version-check --constraint constraints.txt
PYTEST_WORKERS ?= 2

# What is compiled at the first import is kept: setting up compiles nothing.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo setup test quick thorough gpu lint types layers check docs docs-test judges clean

demo: $(STAMP)
	$(BIN)/python -m regauge demo --out out/demo

setup: $(STAMP)

# One torch thread per worker: two workers with a pool of threads each are slower than two threads. Each worker begins with
# one half of the files, so that what a file sets up is set up once.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

# A tenth of the tests by the time that they take: laws of the core, of discovery and of alignment, and the two faces.
QUICK := core_laws adversarial affine_gains batch_norm_laws canonical closest compare layers method_laws scales \
	two_faces whole_element

quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(QUICK:%=tests/test_%.py)

# What `make test` leaves out: more random graphs, families and experiments, and the rest of every covering.
thorough: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m thorough -o faulthandler_timeout=3600

# On a machine with a GPU, with the Python that is there and what it has: nothing is installed, and no network is needed.
# Eight minutes at most; the tests marked gpu take part.
gpu:
	PYTHONPATH=src:papers/src $(PYTHON) benchmarks/gpu.py

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(STAMP)
	$(BIN)/python -m mypy

layers: $(STAMP)
	$(BIN)/python -m pytest tests/test_layers.py

check: test lint types layers

# The site, from pages, docstrings and the command line: open docs/_build/html/index.html. A warning is an error.
docs: $(DOCS_STAMP)
	REGAUGE_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html

# The site in a browser, where chromium is installed.
docs-test: docs
	REGAUGE_SITE=docs/_build/html OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_site.py

# What would be published, both distributions, and whether an index takes it and its page has the README.
dist: $(STAMP)
	@$(INSTALL) --editable '.[release]'
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist papers
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

$(DOCS_STAMP): $(STAMP)
	@$(INSTALL) --editable '.[docs]'
	@touch $@

# Without compiling, as most modules of torch and transformers are never imported: that takes less than half as long.
$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regauge needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	@$(PYTHON) -m pip --version > /dev/null || { echo "$(PYTHON) has no pip; install it (Debian: apt install python3-pip), or name another Python: make PYTHON=..." >&2; exit 1; }
	@echo "setting up .venv; torch is large, this can take minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv --without-pip .venv
	@$(INSTALL) --editable '.[test,lint]' --editable ./papers
	@touch $@

# Cases of other tools on regauge; PEERS is a folder with their checkouts.
judges: $(STAMP)
	for peer in $(notdir $(basename $(shell grep -l '^PEER = Peer' judges/*.py))); do $(BIN)/python judges/$$peer.py || exit 1; done
	$(BIN)/python judges/page.py

clean:
	rm -rf .venv out dist docs/_build docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis

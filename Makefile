# Every target makes .venv itself on a machine with Python 3.11 or newer; a second call starts at once.
#
#   make demo | test | check | bench | figures [ISSUE=A|B|C] [ONLY=name] [DATA=folder]
#   make pages        copies the measured tables into the documentation (figures does so by itself)
#   make checkpoint   trains the demo's checkpoint again (about half an hour; a second call goes on where it stopped)
#
#   PYTHON=python3.12      another interpreter
#   TORCH_INDEX=URL        take torch from another index, such as https://download.pytorch.org/whl/cpu
#   TORCH=installed        use the torch of PYTHON instead of the pinned one
#   OUT=folder SEEDS=3     where the demo writes, and how often it is repeated

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p))))
TORCH_INDEX ?=
TORCH ?= pinned
ISSUE ?= A
ONLY ?=
DATA ?=
OUT ?= runs/demo
SEEDS ?= 1
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CONSTRAINTS := $(VENV)/constraints.txt

# One core is one thread: tests, figures and resumed runs are compared at a fixed number of threads (B's figures: two;
# C's: one per process, on up to four processes).
export OMP_NUM_THREADS := 1

.PHONY: demo test check bench figures pages checkpoint
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-run
	$(BIN)/longstrand demo --out $(OUT) --seeds $(SEEDS)

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

check: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.stamp-dev
	$(BIN)/longstrand bench step

checkpoint: $(VENV)/.stamp-run
	$(BIN)/python -m longstrand.demo.pretrain --out runs/checkpoint

figures: $(VENV)/.stamp-dev
	$(BIN)/python -m longstrand.bench.figures --issue $(ISSUE) $(if $(ONLY),--only $(ONLY)) $(if $(DATA),--data $(DATA))

pages: $(VENV)/.stamp-dev
	$(BIN)/python -m longstrand.bench._results

$(VENV)/.stamp-venv:
	@test -n "$(PYTHON)" || { echo "make: no python3 found; install Python 3.11 or newer, or set PYTHON=" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) is older than Python 3.11; set PYTHON= to a newer one" >&2; exit 2; }
	"$(PYTHON)" -m venv $(if $(filter installed,$(TORCH)),--system-site-packages) $(VENV)
	@touch $@

# The pins, with torch's replaced by the version already there where TORCH=installed: pip then never fetches another.
$(CONSTRAINTS): constraints.txt $(VENV)/.stamp-venv
ifeq ($(TORCH),installed)
	@$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $@ \
	  || { echo "make: TORCH=installed, but $(PYTHON) has no torch; install it there or drop TORCH=" >&2; exit 2; }
	@grep -v '^torch==' constraints.txt >> $@
else
	@cp constraints.txt $@
endif

$(VENV)/.stamp-torch: $(CONSTRAINTS)
	$(if $(filter installed,$(TORCH)),,$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c $(CONSTRAINTS) torch)
	@touch $@

$(VENV)/.stamp-run: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

# samestep: `make train` trains, `make test` tests for a few minutes, `make test-all` for half an hour or more,
# `make check` is the lint and type gate.

PYTHON ?= python3
BIN := .venv/bin
export NO_MKDOCS_2_WARNING := 1
# Two processes test, each file in one of them, in the order of conftest.py; a fixed hash seed gives both the same
# names of tests. Three where many tests wait for others to end or for a time to pass.
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
ON_GPUS := SAMESTEP_TEST_DEVICE=cuda FAKE_CUDA_DEVICES=8 PYTHONPATH=$(CURDIR)/tests/fake_cuda/dist-packages
WITH_DEVICES := $(addprefix tests/,checkpoint comm data engine run runs scripts sharding)
USABLE := .venv/.usable
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: train test test-rest test-all test-gpu fake-cuda golden golden-write emulate simulate simulate-gate conformance check format docs bench bench-short bench-packages prove clean

train: $(USABLE)
	$(BIN)/samestep train lenet

# A few minutes: all tests that start no process, and a dozen smoke tests over real ones (tests/tiers.py).
test: $(READY)
	$(PYTEST) -n 2 -m quick

# What `make test` leaves out: tests over real processes and on fake GPUs, without which it fails, unless torch is a
# build for CUDA. Those that take minutes each are in `make test-all` alone.
test-rest: export SAMESTEP_TEST_NEEDS_FAKE_GPUS := 1
test-rest: $(READY) fake-cuda
	$(PYTEST) -n 3 -m "not quick and not slow"
	$(ON_GPUS) $(PYTEST) -n 2 -m quick $(WITH_DEVICES)

test-all: export SAMESTEP_TEST_NEEDS_FAKE_GPUS := 1
test-all: $(READY) fake-cuda test-gpu
	$(PYTEST) -n 3

# All tests of what has a device, with GPUs as that device: fake ones.
test-gpu: $(READY) fake-cuda
	$(ON_GPUS) $(PYTEST) -n 2 $(WITH_DEVICES)

# A CUDA device in host memory, for the tests of the GPU code: compiled once, in about a minute.
fake-cuda: $(READY)
	$(BIN)/python tests/fake_cuda/build.py

# No bit has moved: against tests/golden/golden.json, or `make golden AGAINST=COMMIT` against what that commit gives.
golden: $(READY)
	$(BIN)/python tests/golden/golden.py $(if $(AGAINST),--against $(AGAINST))

golden-write: $(READY)
	$(BIN)/python tests/golden/golden.py --write

# Portable kernels: the same digests on this CPU and on two that qemu-user emulates, if it is installed.
emulate: $(READY)
	$(BIN)/python tests/portable/emulated.py

# Programs that are drawn, ten minutes of new ones: each that fails is printed with its seed, as small as it gets.
simulate: $(READY)
	$(BIN)/python tests/simulation/run.py --minutes 10

# In the gate: the same seeds of each kind, for half a minute at the most.
simulate-gate: $(READY)
	$(BIN)/python tests/simulation/run.py --gate

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/count_lines.py --limits
	$(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)
	$(BIN)/mkdocs build --strict

# samestep against its peers, start-up and growth; writes benchmarks/results and docs/benchmarks.md. An hour or more.
bench: $(READY) bench-packages
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/strategies.py
	$(BIN)/python benchmarks/invariance.py --json benchmarks/results/invariance.json
	$(BIN)/python benchmarks/page.py

# Every tool by default, in ten minutes on two cores; the page of this machine's figures is in SHORT.
bench-short: SHORT := benchmarks/results/short
bench-short: $(READY) bench-packages
	$(BIN)/python benchmarks/bench.py --short --output $(SHORT)
	$(BIN)/python benchmarks/page.py --results $(SHORT) --docs $(SHORT)

bench-packages: $(READY)
	$(PIP) --quiet --editable '.[bench]'

# Other projects' tests under torchrun and under samestep; with PAGE=1 the page is written.
conformance: $(READY) fake-cuda
	$(BIN)/python tests/conformance/conformance.py $(if $(PAGE),--page) $(if $(SOURCES),--sources $(SOURCES))

# Twenty minutes on all devices of this machine; its file, proven-….json, is to be sent in (docs/devices.md).
prove: $(USABLE)
	$(BIN)/samestep doctor --prove

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .hypothesis

# What training needs. torch first and by its exact version: another package that asks for "torch" must find it there.
$(USABLE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "samestep needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@echo "setting up .venv: samestep with torch and its extras"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[all]'
	touch $@

# What development needs beside it: tests, types, documentation, and the frameworks whose scripts are tested.
$(READY): $(USABLE)
	@echo "adding the packages of development to .venv"
	$(PIP) --quiet --editable '.[dev]'
	touch $@

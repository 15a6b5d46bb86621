# Every target makes what it needs: a fresh clone needs Python 3.11 or newer, gcc and git, nothing else.
#
#   make demo       train a small GPT with its state on NVMe (ARGS="--steps 20" and so on reach `tiering demo`)
#   make test       the fast tests            make test-all   also slow ones, and C under the sanitizers
#   make lint       formatting, types, import order, warnings of the C compiler
#   make test-newest  tiering.integrations with the newest releases of transformers, Lightning and so on
#   make wheels     dist/*.whl for two CPUs   make clean      remove whatever these targets made
#   make gpu-carry  dist/gpu: what bench/gpu_check.sh needs on a machine with a GPU and no network

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules
# Empty is off. Container images set it: then each of the hundreds of interpreters that tests start would compile the
# project again, and each test worker all tests.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
FUZZ_SECONDS ?= 8
GPU_PYTHON ?= 3.12
PYTEST_ARGS ?=
TEST_WORKERS ?= 3

C_SOURCES := $(wildcard aio_csrc/*.[ch] aio_csrc/*.inc optim_cpu/csrc/*.[ch] optim_cpu/csrc/*.inc)
CUDA_SOURCES := $(wildcard zero3/device/kernels/*.cu tests/fakes/*.h)
C_BUILDERS := $(wildcard aio_csrc/build_aio.py optim_cpu/csrc/build_optim.py)

# Runs a command that is only interesting when it fails.
quietly = log=$$(mktemp); if $(1) >$$log 2>&1; then rm -f $$log; else \
	status=$$?; cat $$log >&2; rm -f $$log; exit $$status; fi

.PHONY: demo test test-all test-newest lint sanitize wheels gpu-carry clean toolchain emulator sidecar-tools wheel-tools

demo: $(STAMP)
	$(BIN)/tiering demo $(ARGS)

# A file's tests stay on one worker: they share ranks, references and names. PYTEST_ARGS="-n 0" is one process.
test: $(STAMP) sidecar-tools
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: $(STAMP) sanitize emulator sidecar-tools wheel-tools
	$(BIN)/python -m pytest -q --hypothesis-profile=thorough $(PYTEST_ARGS)

# Each night: a release of a library that breaks its front end is seen here first, also one beyond our range.
NEWEST := .venv-newest
FRONT_ENDS := accelerate bitsandbytes datasets lightning peft pytorch-lightning torchao transformers trl
test-newest:
	@$(MAKE) --no-print-directory VENV=$(NEWEST) $(NEWEST)/.installed
	@$(call quietly,$(NEWEST)/bin/python -m pip install --disable-pip-version-check -U \
		$$(grep '^torch==' constraints-dev.txt) $(FRONT_ENDS))
	@$(NEWEST)/bin/python -c "from importlib.metadata import version; \
		print(*(f'{name} {version(name)}' for name in '$(FRONT_ENDS) torch'.split()), sep='\n')"
	$(NEWEST)/bin/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile -m "not gpu" tests/tiering/integrations \
		$(PYTEST_ARGS)

# Both C libraries with threads, forks, faults and wild arguments, without an interpreter in between: for memory, then
# for races.
SANITIZED := gcc -std=gnu11 -O1 -g -Wall -Wextra -fno-sanitize-recover=all -pthread
# The kernels' sources are loops in hundreds of forms: compiled side by side, and memory is checked by calls, not in line.
SANITIZED_KERNEL := $(SANITIZED) -g1 -ffp-contract=off -fno-math-errno -fno-trapping-math \
	--param asan-instrumentation-with-call-threshold=0 -Ioptim_cpu/csrc
KERNEL_SOURCES := $(wildcard optim_cpu/csrc/*.c) tests/optim/stress_kernels.c

sanitize: | toolchain
	@scratch=$$(mktemp -d -p .); trap 'rm -rf '$$scratch EXIT; \
	for check in address,undefined thread; do \
		echo "-fsanitize=$$check"; \
		$(SANITIZED) -fsanitize=$$check -Iaio_csrc aio_csrc/*.c tests/aio/test_*.c -o $$scratch/aio; \
		$$scratch/aio $$scratch; \
		$(SANITIZED) -fsanitize=$$check -Iaio_csrc aio_csrc/*.c tests/aio/fuzz_aio.c -o $$scratch/fuzz; \
		$$scratch/fuzz $$scratch $(FUZZ_SECONDS); \
		mkdir $$scratch/$$check; \
		printf '%s\n' $(KERNEL_SOURCES) | xargs -P "$$(nproc)" -I SOURCE sh -c \
			"$(SANITIZED_KERNEL) -fsanitize=$$check -c SOURCE -o $$scratch/$$check/\$$(basename SOURCE).o"; \
		$(SANITIZED) -fsanitize=$$check $$scratch/$$check/*.o -lm -o $$scratch/optim; \
		$$scratch/optim; \
		echo "kernels: sound"; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES) $(CUDA_SOURCES)
	@echo "C extensions, every warning an error"
	@$(call quietly,.ci/strict-build $(BIN)/python)

$(VENV)/bin/python: | toolchain
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# Editing C rebuilds, because the stamp is older than the source; editing Python needs nothing (-e).
$(STAMP): pyproject.toml setup.py constraints-dev.txt $(C_SOURCES) $(C_BUILDERS) | $(VENV)/bin/python
	@echo "installing into $(VENV); the first time fetches torch"
	@$(call quietly,$(BIN)/python -m pip install --disable-pip-version-check -c constraints-dev.txt -e '.[dev]')
	@touch $@

toolchain:
	@.ci/toolchain $(PYTHON)

# For the tests on another CPU, which skip without it.
emulator: | toolchain
	@.ci/toolchain $(PYTHON) --emulator

# A browser and Prometheus, for the tests that look at the sidecar with them and skip without.
sidecar-tools: | toolchain
	@.ci/toolchain $(PYTHON) --sidecar

# What builds wheels and what checks them, 100 MB to fetch; the tests of wheels skip without.
wheel-tools: $(STAMP)
	@$(call quietly,$(BIN)/python -m pip install --disable-pip-version-check -c constraints-dev.txt \
		auditwheel cffi setuptools ziglang)

wheels: wheel-tools
	@rm -rf dist
	@.ci/wheels $(BIN)/python dist
	@ls dist/*.whl

gpu-carry: wheels
	@$(BIN)/python bench/gpu_carry.py --python $(GPU_PYTHON) $(ARGS)

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f tiering/_aio*.so optim_cpu/_kernels*.so tiering/_aio.c optim_cpu/_kernels.c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

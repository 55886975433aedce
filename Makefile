# `make help` lists the targets. On a bare machine (Python 3.11 or later, a C++20 compiler) each makes what it needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= $(shell nproc)
UNITY ?= ON
TORCH ?= 2.9.0
OUT ?= build/site-for
TRY_TORCHES ?=
PYTEST_ARGS ?=
DEMO_ARGS ?= --steps 20 --batch 16
BENCH_ARGS ?=
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PY := $(BIN)/python
READY := $(VENV)/.ready
BUILD_READY := $(VENV)/.ready-to-build
PY_FILES = $(wildcard src tests examples benchmarks tools docs/conf.py)
CXX_FILES = $(shell find csrc tests cmake -name '*.h' -o -name '*.cpp')
TIDY_FILES = $(wildcard csrc/core/*.cpp csrc/core/planning/*.cpp csrc/system/*.cpp csrc/storage/*.cpp csrc/engine/*.cpp)
PYTHON_INCLUDE = $(shell $(PY) -c "import sysconfig; print(sysconfig.get_path('include'))")
TIDY_FLAGS = -std=c++20 -Wthread-safety -Icsrc -isystem $(PYTHON_INCLUDE)
TEST_TIMEOUT_S := 300

# $(call compile,PYTHON,BUILD_DIR,OPTIONS,TARGET): configure and compile; a few seconds when nothing changed.
# Two makes at once in one checkout take turns. Sources are compiled a few at a time together, since most of their time goes
# into headers; UNITY=OFF compiles each by itself, which is quicker while one is edited.
define compile
mkdir -p $(2) && exec 9> $(2)/.lock && { flock 9 2> /dev/null || true; }; \
cmake -S . -B $(2) -G Ninja -DPython_EXECUTABLE="$(1)" -DTORCHOFFLOAD_TESTING=ON -DCMAKE_UNITY_BUILD=$(UNITY) \
	$(3) > $(2)/configure.log 2>&1 \
	|| { cat $(2)/configure.log; exit 1; }; \
cmake --build $(2) --parallel $(JOBS) --target $(or $(4),all)
endef

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What building and the demo take, and then, for all else, the rest of what is pinned.
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --progress-bar on --requirement
$(BUILD_READY): requirements-build.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $<
	echo "$(CURDIR)/src" > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchoffload-dev.pth"
	touch $@

$(READY): requirements-dev.txt $(BUILD_READY)
	$(PIP_INSTALL) $<
	touch $@

.PHONY: venv
venv: $(READY)  ## the pinned development environment in .venv

# cmake and ninja are those of .venv, except where another interpreter is built for and there may be no .venv.
build core editor: export PATH := $(BIN):$(PATH)
site: export PATH := $(PATH):$(BIN)

IN_PLACE = -DTORCHOFFLOAD_OUTPUT_DIR="$(CURDIR)/src/torchoffload"
.PHONY: build
build: $(READY)  ## compile the core and its test build into src/torchoffload
	@$(call compile,$(PY),build/dev,$(IN_PLACE))

.PHONY: core
core: $(BUILD_READY)  ## compile the core alone, without its test build
	@$(call compile,$(PY),build/dev,$(IN_PLACE),_C)

.PHONY: editor
editor: $(BUILD_READY)  ## write the compile commands that an editor's clangd asks for (.clangd says where they are)
	@cmake -S . -B build/editor -G Ninja -DPython_EXECUTABLE="$(PY)" -DTORCHOFFLOAD_TESTING=ON

.PHONY: demo
demo: core  ## train a small GPT plain, offloaded and in half of the memory by fit, and compare
	$(PY) examples/train_gpt.py $(DEMO_ARGS)

# One process a core. What is given in PYTEST_ARGS comes last and so counts.
WORKERS ?= $(JOBS)
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses=$(WORKERS) --dist=loadgroup --timeout=$(TEST_TIMEOUT_S)
.PHONY: test
test: build  ## the test suite on the disk tier and the simulated device, but for what is slow
	$(PYTEST) tests -m "not slow" $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: build  ## the slow tests alone
	$(PYTEST) tests -m slow $(PYTEST_ARGS)

.PHONY: test-all
test-all: build  ## every test of the suite, the slow ones last
	$(PYTEST) tests -m "not slow" $(PYTEST_ARGS)
	$(PYTEST) tests -m slow $(PYTEST_ARGS)

FLOOR ?= core
.PHONY: quick
quick: build  ## the quick tests of one folder of tests/, in seconds: make quick FLOOR=core
	$(PYTEST) --numprocesses=0 tests/$(FLOOR) -m "not slow" -q $(PYTEST_ARGS)

INTEGRATIONS_PY := $(CURDIR)/.venv-integrations/bin/python
INTEGRATIONS_READY := .venv-integrations/.ready
# torch first and alone: what follows takes the torch that is there.
$(INTEGRATIONS_READY): requirements-integrations.txt requirements-integrations-ms-swift.txt requirements-integrations-torchtune.txt
	test -x $(INTEGRATIONS_PY) || $(PYTHON) -m venv .venv-integrations
	$(INTEGRATIONS_PY) -m pip install --disable-pip-version-check --quiet "$$(grep ^torch== $<)"
	$(INTEGRATIONS_PY) -m pip install --disable-pip-version-check --quiet --requirement $<
	$(INTEGRATIONS_PY) -m pip install --disable-pip-version-check --quiet --no-deps \
		--requirement requirements-integrations-ms-swift.txt 2> /dev/null
	$(INTEGRATIONS_PY) -m pip install --disable-pip-version-check --quiet --no-deps --upgrade \
		--target .venv-integrations/torchtune --requirement requirements-integrations-torchtune.txt
	touch $@

.PHONY: test-integrations
test-integrations: build $(INTEGRATIONS_READY)  ## trainers' libraries, the real ones, with and without offloading
	PYTHONPATH="$(CURDIR)/src" TORCHOFFLOAD_REQUIRE_INTEGRATIONS=1 $(INTEGRATIONS_PY) -m pytest tests/integrations \
		-m "not cuda" --timeout=$(TEST_TIMEOUT_S) $(PYTEST_ARGS)

.PHONY: mutants
mutants: build  ## leave out each wait and check in turn: its scenario has to notice
	$(PYTEST) tests/mutants $(PYTEST_ARGS)

# What runs under which sanitizers, FUZZ_SECONDS each and JOBS at a time. Programs share the objects of each sanitizer.
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 1
FUZZ_SOURCES = $(wildcard csrc/core/*.cpp csrc/core/planning/*.cpp csrc/system/*.cpp csrc/storage/*.cpp)
FUZZ_RUNS := core_fuzz:address,undefined storage_stress:thread storage_stress:address,undefined \
	tiers_stress:thread tiers_stress:address,undefined
FUZZ_CXX = $(CXX) -std=c++20 -g -O1 -DTORCHOFFLOAD_TESTING -fno-sanitize-recover=all -Icsrc -pthread
.PHONY: fuzz
fuzz:  ## core/ under ASan and UBSan, storage/ and its I/O threads under TSan: random lives, beside models
	@rm -rf build/fuzz && mkdir -p build/fuzz/thread build/fuzz/address
	@for sanitizers in thread address,undefined; do printf "$$sanitizers %s\n" $(FUZZ_SOURCES); done \
		| xargs -P $(JOBS) -L 1 $(SHELL) -c 'set -e; name=$${1//\//_}; \
			$(FUZZ_CXX) -fsanitize=$$0 -c $$1 -o build/fuzz/$${0%,*}/$${name%.cpp}.o'
	@printf '%s\n' $(FUZZ_RUNS) | xargs -P $(JOBS) -I {} $(SHELL) -c 'set -e; run={}; source=$${run%:*}; \
		sanitizers=$${run#*:}; program=build/fuzz/$$source-$${sanitizers%,*}; \
		$(FUZZ_CXX) -fsanitize=$$sanitizers tests/fuzz/$$source.cpp build/fuzz/$${sanitizers%,*}/*.o -o $$program; \
		echo "$$program: $(FUZZ_SECONDS) s from seed $(FUZZ_SEED)"; \
		$$program --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)'

PROGRAM_ARGS ?= --device disk simulated --programs 20000 --jobs $(JOBS)
.PHONY: fuzz-programs
fuzz-programs: build  ## random autograd programs, stock and offloaded: 20,000 on the disk tier and the simulated device
	$(PY) tests/support/fuzz_programs.py $(PROGRAM_ARGS)

SOAK_ARGS ?= --device disk --steps 10000
.PHONY: soak
soak: build  ## a small model that varies, for 10,000 steps: nothing may pile up
	$(PY) tests/support/soak.py $(SOAK_ARGS)

.PHONY: site
site:  ## the package for the torch of PYTHON into OUT, as PYTHONPATH takes it; installs nothing
	@$(call compile,$$(command -v $(PYTHON)),$(OUT)-build)
	@rm -rf $(OUT) && mkdir -p $(OUT)/torchoffload
	@cp -r src/torchoffload/. $(OUT)/torchoffload && rm -f $(OUT)/torchoffload/*.so
	@cmake --install $(OUT)-build --prefix $(OUT) > $(OUT)-build/install.log

.PHONY: test-gpu
test-gpu: OUT := build/gpu
GPU_PARTS ?= 8
test-gpu: site  ## the CUDA suite in GPU_PARTS parts side by side, with PYTHON's torch; a test that skips is a failure
	tools/test_gpu.sh $(PYTHON) "$(CURDIR)/$(OUT)" build/gpu-tests $(GPU_PARTS) $(PYTEST_ARGS)

.PHONY: bench
bench: OUT := build/gpu
bench: site  ## the benchmarks, on the GPU and with the torch that PYTHON has
	PYTHONPATH="$(CURDIR)/$(OUT)" $(PYTHON) benchmarks/train_step.py $(BENCH_ARGS)

DOCS_READY := $(VENV)/.ready-for-docs
$(DOCS_READY): requirements-docs.txt $(BUILD_READY)
	$(PIP_INSTALL) $<
	touch $@

SPHINX = $(PY) -m sphinx -E -q
.PHONY: docs
docs: core $(DOCS_READY)  ## the site into build/docs; a link that leads nowhere, like every warning, is an error
	$(SPHINX) -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

.PHONY: docs-links
docs-links: core $(DOCS_READY)  ## ask for each page of another site that the site links to, which takes a network
	$(SPHINX) -b linkcheck docs build/docs-links

.PHONY: wheel
wheel: $(READY)  ## the sdist, and from it a wheel for the torch of .venv, into dist/
	rm -rf dist && PYTHONPATH=tools $(PY) -c "import build_backend; print(build_backend.build_sdist('dist'))"
	PATH="$(BIN):$$PATH" $(PY) -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation \
		--wheel-dir dist dist/*.tar.gz

# Names, or paths of interpreters that are not on PATH.
WHEEL_PYTHONS ?= python3.11 python3.12 python3.13 python3.14
WHEEL_TORCHES ?=
WHEEL_PLATFORM ?=
WHEELS_READY := $(VENV)/.ready-for-wheels
$(WHEELS_READY): requirements-wheels.txt $(BUILD_READY)
	$(PIP_INSTALL) $<
	touch $@

.PHONY: wheels
wheels: $(WHEELS_READY)  ## for each of WHEEL_PYTHONS a wheel for all releases of torch (WHEEL_TORCHES), into dist/
	$(PY) tools/build_wheels.py --pythons $(WHEEL_PYTHONS) \
		$(if $(WHEEL_PLATFORM),--platform $(WHEEL_PLATFORM)) $(if $(WHEEL_TORCHES),--torches $(WHEEL_TORCHES))

.PHONY: try-wheels
try-wheels: $(WHEELS_READY)  ## install those of dist/ into fresh environments (TRY_TORCHES), and train a step in each
	$(PY) tools/try_wheels.py dist/*manylinux*.whl --pythons $(WHEEL_PYTHONS) \
		$(if $(TRY_TORCHES),--torches $(TRY_TORCHES))

TRY_DOCS_ARGS ?=
.PHONY: try-docs
try-docs: $(WHEELS_READY)  ## run what README and the gallery show with the wheel in dist/ for PYTHON, and compare
	$(PY) tools/try_docs.py dist/*manylinux*.whl --python $(PYTHON) $(TRY_DOCS_ARGS)

.PHONY: check-torch
check-torch: $(READY)  ## compile and link against torch TORCH
	PATH="$(BIN):$$PATH" $(PY) tools/check_torch.py $(TORCH)

.PHONY: check-cuda-compile
check-cuda-compile: build  ## compile the CUDA backend on a CPU torch
	PATH="$(BIN):$$PATH" cmake --build build/dev --target cuda_check

.PHONY: lint
lint: $(READY)  ## ruff, mypy, clang-format, codespell, clang's check of locks, and clang-tidy where it is quick
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/codespell
	@$(PY) tools/prose.py
	@echo "clang-tidy on core/, system/, storage/ and engine/"
	@printf '%s\n' $(TIDY_FILES) | xargs -P $(JOBS) -n 3 \
		sh -c 'out=$$($(BIN)/clang-tidy --quiet "$$@" -- $(TIDY_FLAGS) 2>&1) || { echo "$$out"; exit 1; }' tidy
	@echo "locks on the floors that include torch"
	$(PY) tools/check_thread_safety.py $(BIN)/clang-tidy

.PHONY: format
format: $(READY)  ## rewrite the sources as lint wants them
	-$(BIN)/ruff check --fix-only $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

.PHONY: clean
clean:  ## remove what was built, but not .venv
	rm -rf build dist src/torchoffload/*.so src/torchoffload/_build_info.json

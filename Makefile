# Everything that a user or a developer starts; `make help` lists it. Each purpose, Python version and platform has
# an environment of its own under .venv/, made on first use; a stamp file in it says that all is installed. With
# ENV=system the tests run in the interpreter that is there, with what it has, and nothing is installed.

PYTHON ?= python3
EXTRA ?= auto
PLATFORM ?= cpu
ENV ?= venv
JAX ?=
PART ?= 1/1
TESTS ?=
PYTEST_ARGS ?=
ARGS ?=
# Workers of the tests. On a GPU they share the cards (tests/_devices.py), and each compiles on about two cores. A TPU
# belongs to one process.
CORES = $(shell getconf _NPROCESSORS_ONLN)
JOBS ?= $(if $(filter cpu,$(PLATFORM)),2,$(if $(filter gpu,$(PLATFORM)),$(shell expr \( $(CORES) + 1 \) / 2),0))

.DEFAULT_GOAL := help
.PHONY: help train env test test-full test-targets examples parity integrations pairs lint format types docs wheel clean
.SUFFIXES:

GOALS := $(or $(MAKECMDGOALS),help)

# --- checks ---------------------------------------------------------------------------------------------------------

ifneq ($(filter-out help clean,$(GOALS)),)
  PY := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
  ifeq ($(PY),)
    $(error PYTHON=$(PYTHON) does not start. liger-jax needs Python 3.11 or newer: make $(GOALS) PYTHON=/path/to/python)
  endif
  ifneq ($(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11))'),True)
    $(error PYTHON=$(PYTHON) is Python $(PY). liger-jax needs 3.11 or newer: make $(GOALS) PYTHON=/path/to/python)
  endif
  ifeq ($(filter cpu gpu tpu,$(PLATFORM)),)
    $(error PLATFORM=$(PLATFORM) must be cpu, gpu or tpu)
  endif
  ifeq ($(filter venv system,$(ENV)),)
    $(error ENV=$(ENV) must be venv, or system for the packages that $(PYTHON) has)
  endif
  ifeq ($(ENV),system)
    ifneq ($(filter-out test test-full test-targets examples parity,$(GOALS)),)
      $(error ENV=system is for make test, test-full, test-targets, examples and parity)
    endif
    ifneq ($(JAX),)
      $(error ENV=system installs nothing, so JAX=$(JAX) cannot be chosen: leave it out, or ENV=system)
    endif
  endif
endif

# --- what the training example installs for -------------------------------------------------------------------------

ifneq ($(filter train,$(GOALS)),)
  ACCELERATOR := $(EXTRA)
  BECAUSE := EXTRA=$(EXTRA) says so
  ifeq ($(EXTRA),auto)
    # Google's PCI devices (vendor 0x1ae0) are also network cards and disks, so a TPU is known by its device number.
    GOOGLE := $(shell grep -slx 0x1ae0 /sys/bus/pci/devices/*/vendor)
    ifneq ($(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),)
      ACCELERATOR := cuda
      BECAUSE := nvidia-smi lists a GPU
    else ifneq ($(and $(GOOGLE),$(shell grep -slxE '0x00(27|56|5e|62|63|6f|76|7c|83)' $(GOOGLE:vendor=device))),)
      ACCELERATOR := tpu
      BECAUSE := this machine has a TPU
    else
      ACCELERATOR := none
      BECAUSE := no GPU and no TPU found
    endif
  endif
  ifeq ($(filter cuda tpu none,$(ACCELERATOR)),)
    $(error EXTRA=$(EXTRA) must be auto, cuda, tpu or none)
  endif
endif

# --- environments ---------------------------------------------------------------------------------------------------

VERSIONS := py$(PY)$(if $(JAX),-jax$(JAX))
TRAIN_ENV := .venv/train-$(VERSIONS)-$(ACCELERATOR)
TEST_ENV := .venv/test-$(VERSIONS)-$(PLATFORM)
TEST_PYTHON := $(if $(filter system,$(ENV)),$(PYTHON),$(TEST_ENV)/bin/python)
DOCS_ENV := .venv/docs-$(VERSIONS)

EXTRAS_none := examples
EXTRAS_cuda := examples,cuda
EXTRAS_tpu := examples,tpu
EXTRAS_TEST_cpu := test,aot
EXTRAS_TEST_gpu := test,cuda
EXTRAS_TEST_tpu := test,tpu
EXTRAS_PARITY := $(EXTRAS_TEST_$(PLATFORM)),parity

# $(call install,environment,extras)
define install
@echo "make: installing liger-jax[$(2)] into $(1); the first time takes some minutes"
@test -x $(1)/bin/pip || $(PYTHON) -m venv $(1)
@$(1)/bin/python -m pip install --disable-pip-version-check -qq -e '.[$(2)]' $(if $(JAX),'jax==$(JAX)')
@touch $@
endef

$(TRAIN_ENV)/.installed: pyproject.toml
	$(call install,$(TRAIN_ENV),$(EXTRAS_$(ACCELERATOR)))

$(TEST_ENV)/.installed: pyproject.toml
	$(call install,$(TEST_ENV),$(EXTRAS_TEST_$(PLATFORM)))

$(DOCS_ENV)/.installed: pyproject.toml
	$(call install,$(DOCS_ENV),docs)

$(TEST_ENV)/.installed-parity: $(TEST_ENV)/.installed
	$(call install,$(TEST_ENV),$(EXTRAS_PARITY))

# A checker has an environment of its own, so that ruff alone is installed to run ruff.
TOOL_ENV = .venv/$(1)-py$(PY)

$(call TOOL_ENV,%)/.installed:
	@echo 'make: installing $* into $(@D)'
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check -qq $*
	@touch $@

# Other people's trainers and libraries, each with what it needs itself, and the packages of each.
PEERS ?= tunix maxtext libraries
PEER_PACKAGES_tunix := google-tunix
PEER_PACKAGES_maxtext := maxtext[tpu] google-tunix
PEER_PACKAGES_libraries := equinox grain qwix tokenizers tqdm
PEER_ENV = .venv/integrations-$(VERSIONS)-$(1)

# A peer that does not install leaves the reason in a file, and its tests are not run.
$(call PEER_ENV,%)/.installed: pyproject.toml
	@echo 'make: installing $(PEER_PACKAGES_$*) into $(@D); the first time takes some minutes'
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check -qq -e . pytest beartype $(PEER_PACKAGES_$*) \
	  $(if $(JAX),'jax==$(JAX)') 2>$(@D)/why && touch $@ || true

# --- what one can make ----------------------------------------------------------------------------------------------

help:
	@echo 'make train      train a small LLaMA on real text         ARGS="--steps 50"  EXTRA=cuda|tpu|none'
	@echo 'make env        the environment of the tests, in which python and liger-jax are those of this checkout'
	@echo 'make test       the test suite, minutes                  TESTS=tests/ops  PYTEST_ARGS="-x"  PLATFORM=gpu|tpu'
	@echo '                JOBS=8 workers, PART=1/2 of the cases, ENV=system: in the Python that is there'
	@echo '                PYTEST_ARGS=--costs: seconds and cases of each file; --cold: nothing compiled before'
	@echo 'make test-full  all shapes, options and model families, an hour   the same'
	@echo 'make test-targets  compiles for GPUs and TPUs besides the H200 and the v5e of the others   the same'
	@echo 'make examples   every example of the pages, of docstrings and in examples/'
	@echo 'make parity     our models beside those of Hugging Face, which it installs'
	@echo 'make integrations  our losses in tunix, MaxText, with Equinox, grain, qwix, which it installs; PEERS=tunix'
	@echo 'make pairs      the lowest and the highest versions of the dependencies, which it installs'
	@echo 'make lint       ruff: mistakes and format'
	@echo 'make format     ruff puts the format right'
	@echo 'make types      basedpyright'
	@echo 'make docs       the documentation site in site/; it needs no network'
	@echo 'make wheel      dist/*.whl, and what is in it'
	@echo 'make clean      removes the environments and what was built; training runs stay'
	@echo 'All take PYTHON=python3.12 and JAX=0.11.2; each choice has an environment of its own in .venv/.'

# JAX_PLATFORMS=cpu: on a machine without the hardware, looking for it prints errors.
train: $(TRAIN_ENV)/.installed
	@echo 'make: training on $(if $(filter none,$(ACCELERATOR)),the CPU,$(ACCELERATOR)): $(BECAUSE)'
	@$(if $(filter none,$(ACCELERATOR)),JAX_PLATFORMS=cpu) $(TRAIN_ENV)/bin/python -m examples.train_llama $(ARGS)

# ALLOW_MULTIPLE_LIBTPU_LOAD: libtpu compiles in several workers at once, and no TPU is there to fight for.
CPU_ONLY := JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=1
# Other people's plugins stay out: a warning of theirs would be an error here. Each worker begins with a stretch of its
# own, in which tests share what a module prepares, and who is done takes cases from the others. Bytecode is kept, even
# where the environment says otherwise: dozens of tests start processes, and each would compile 400 modules.
PYTEST = PYTHONDONTWRITEBYTECODE= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(if $(filter cpu,$(PLATFORM)),$(CPU_ONLY)) $(TEST_PYTHON) -m pytest \
  -p xdist -n $(JOBS) --dist=worksteal --platform=$(PLATFORM) --part=$(PART)
installed = $(if $(filter venv,$(ENV)),$(TEST_ENV)/.installed$(1))

env: $(call installed)
	@echo 'make: the environment is activated with . $(TEST_ENV)/bin/activate'

# Doctests are examples: without TESTS, the package is not searched for them.
test: $(call installed)
	@$(PYTEST) -m 'not full and not example and not parity and not integrations' $(PYTEST_ARGS) $(or $(TESTS),tests)

# Without what `make examples` runs, and `make test-targets`.
test-full: $(call installed)
	@$(PYTEST) -m 'not targets and (full or not example)' $(PYTEST_ARGS) $(TESTS)

test-targets: $(call installed)
	@$(PYTEST) -m targets $(PYTEST_ARGS) $(or $(TESTS),tests/aot tests/planner)

examples: $(call installed)
	@$(PYTEST) -m 'example and not full' $(PYTEST_ARGS) $(TESTS)

parity: $(call installed,-parity)
	@$(PYTEST) -m parity $(PYTEST_ARGS) $(TESTS)

integrations: $(foreach peer,$(PEERS),$(call PEER_ENV,$(peer))/.installed)
	@failed=; for peer in $(PEERS); do \
	  env=.venv/integrations-$(VERSIONS)-$$peer; \
	  if test -e $$env/.installed; then \
	    $(CPU_ONLY) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $$env/bin/python -m pytest -m integrations $(PYTEST_ARGS) \
	      tests/integrations/test_$$peer.py || failed="$$failed $$peer"; \
	  else \
	    echo "make: $$peer does not install here, so its tests are not run: $$(grep -m1 ERROR $$env/why || tail -n1 $$env/why)"; \
	  fi; \
	done; test -z "$$failed" || { echo "make: tests failed with$$failed"; exit 1; }

pairs:
	@$(CPU_ONLY) $(PYTHON) tests/packaging/pairs.py

RUFF := $(call TOOL_ENV,ruff)
PYRIGHT := $(call TOOL_ENV,basedpyright)

lint: $(RUFF)/.installed
	@$(RUFF)/bin/ruff check .
	@$(RUFF)/bin/ruff format --check .

format: $(RUFF)/.installed
	@$(RUFF)/bin/ruff format .

types: $(PYRIGHT)/.installed $(TEST_ENV)/.installed
	@$(PYRIGHT)/bin/basedpyright --pythonpath $(TEST_ENV)/bin/python

# NO_MKDOCS_2_WARNING: the theme advertises its successor. The hooks import the package, and no device is looked for.
docs: $(DOCS_ENV)/.installed
	@JAX_PLATFORMS=cpu NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/python -m mkdocs build --strict --quiet
	@echo 'make: the site is in site/. Open site/index.html; no server is needed'

# build/ would bring files of an earlier build into the wheel.
wheel: $(TEST_ENV)/.installed
	@rm -rf build
	@$(TEST_ENV)/bin/python -m build --wheel --no-isolation --outdir dist >/dev/null
	@rm -rf build
	@for wheel in dist/*.whl; do echo "$$wheel"; $(TEST_ENV)/bin/python -m zipfile -l "$$wheel"; done

clean:
	rm -rf .venv build dist site liger_jax.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

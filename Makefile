# make help says what there is; each target installs what it needs into .venv first.
.DEFAULT_GOAL := help
PY := .venv/bin/python

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

demo: ## a whole pipeline on this machine, evicted twice on the way
	@.ci/install trainer
	@$(PY) examples/demo/demo.py

test: ## every test: without a cluster, on a control plane, on real nodes (TESTS=tests/unit/core for some)
	@.ci/install operator,trainer,cluster,dev
ifdef TESTS
	@$(PY) -m pytest $(TESTS)
else
	@$(PY) -m pytest --ignore=tests/integration --numprocesses=auto --maxprocesses=4 --dist=loadfile
	@$(PY) -m e2e
endif

check: ## style, types, layers, generated files
	@.ci/install operator,trainer,cluster,dev
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy
	@PYTHONPATH=operator:trainer:. .venv/bin/lint-imports --no-cache
	@$(PY) -m finetune_operator.crd.generate --check
	@$(PY) .ci/generate_docs.py --check
	@$(PY) .ci/check_style.py

cluster: cluster-deps ## a Kubernetes cluster on this machine; testcluster/README.md tells what can be done with it
	@$(PY) -m testcluster up $(UP)

cluster-deps: ## what a cluster and image builds need: Debian packages, Go, the programs
	@.ci/install cluster
	@$(PY) -m testcluster.deps

images: ## finetune-operator:dev and finetune-trainer:dev, with docker or buildah
	@.ci/install cluster
	@$(PY) -m testcluster.images

crds: ## write crds/ anew from the models
	@.ci/install operator,dev
	@$(PY) -m finetune_operator.crd.generate

docs: ## write the generated pages of docs/reference anew
	@.ci/install operator,dev
	@$(PY) .ci/generate_docs.py

clean: ## everything that the targets above made
	rm -rf .venv .demo .finetune

.PHONY: help demo test check cluster cluster-deps images crds docs clean

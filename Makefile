# `make help` lists the targets. Each target first installs what it needs into .venv.
.DEFAULT_GOAL := help
PY := .venv/bin/python
# Extras of the tests: all there are.
ALL := operator,trainer,qlora,gcs,mlflow,wandb,tensorboard,cluster,dev

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

demo: ## run a whole pipeline on this machine, with two interruptions
	@.ci/install trainer
	@$(PY) examples/demo/demo.py

test: ## run all unit, integration and e2e tests (TESTS=tests/unit/core for some)
	@.ci/install $(ALL)
ifdef TESTS
	@$(PY) -m pytest $(TESTS)
else
	@units=0; $(PY) -m pytest --ignore=tests/integration --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder --durations=15 \
	  || units=$$?; $(PY) -m e2e && exit $$units  # both, so that one run shows every failure
endif

# Every switch that adds tests to a plain `make test`. CONTRIBUTING.md says what each needs.
test-all: export TRAINING := all
test-all: export STORES := all
test-all: export FAULTS := all
test-all: export KUBERNETES := all
test-all: export GITOPS := all
test-all: export MONITORING := all
test-all: export KIND := all
test-all: test ## run all tests of `make test`, and the slow ones

check: ## check style, types, layers and generated files
	@.ci/install $(ALL)
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy
	@PYTHONPATH=operator:trainer:. .venv/bin/lint-imports --no-cache
	@$(PY) -m finetune_operator.crd.generate --check
	@$(PY) .ci/generate.py --check
	@$(PY) .ci/check_style.py

cluster: cluster-deps ## create a Kubernetes cluster on this machine (testcluster/README.md)
	@$(PY) -m testcluster up $(UP)

cluster-deps: ## install Debian packages and Go, and build the programs of a cluster
	@.ci/install cluster
	@$(PY) -m testcluster.deps

images: ## build finetune-operator:dev and finetune-trainer-cpu:dev (IMAGES=trainer: the one for GPUs)
	@.ci/install cluster
	@$(PY) -m testcluster.images $(IMAGES)

release: ## push the tagged version to REGISTRY (docs/release.md)
	@.ci/install cluster
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) .ci/release.py $(REGISTRY)

crds: ## generate the CRD in crds/ and in the chart from the models
	@.ci/install operator,dev
	@$(PY) -m finetune_operator.crd.generate

docs: ## generate the pages of docs/reference that come from the code, and the chart's README
	@.ci/install operator,dev
	@$(PY) .ci/generate.py

clean: ## delete .venv, .demo and .finetune
	rm -rf .venv .demo .finetune

.PHONY: help demo test test-all check cluster cluster-deps images release crds docs clean

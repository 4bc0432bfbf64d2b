# `make help` lists the targets. Each target first installs what it needs into .venv.
.DEFAULT_GOAL := help
PY := .venv/bin/python
# Extras of the tests: all there are, and the ones of the folders that need no PyTorch.
ALL := operator,trainer,qlora,gcs,mlflow,wandb,tensorboard,mcp,cluster,dev,parity,site
LIGHT := operator,cluster,dev
LIGHT_TESTS := tests/unit/core% tests/unit/kubernetes% tests/unit/controller% testcluster/tests/unit%
# A new environment: an earlier navigation stays on pages that are unchanged.
SITE := --conf-dir docs --doctree-dir build/doctrees --fresh-env --fail-on-warning --keep-going --quiet . build/site
PYTEST_ALL := --ignore=tests/integration --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder --durations=15 \
	--max-worker-restart=0 -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

demo: ## run a whole pipeline on this machine, with two interruptions
	@.ci/install trainer
	@$(PY) examples/demo/demo.py

unit: ## run the quick unit tests in minutes (T=tests/unit/core for some: seconds)
	@.ci/install $(if $(filter-out $(LIGHT_TESTS),$(or $(T),all)),$(ALL),$(LIGHT))
	@$(PY) -m pytest -q -m "not slow" $(or $(T),$(PYTEST_ALL))

test: ## run all tests that need neither root nor a cluster (T=tests/unit/core for some)
	@.ci/install $(ALL)
	@$(PY) -m pytest $(or $(T),$(PYTEST_ALL))

test-clusters: ## run the tests on API servers and real nodes; as root on Debian (T=e2e/test_smoke.py for some)
	@.ci/install $(ALL)
	@$(PY) -m e2e $(T)

# Every switch that adds tests to a plain `make test` and `make test-clusters`. CONTRIBUTING.md says what each needs.
test-all: export TRAINING := all
test-all: export SERVING := all
test-all: export STORES := all
test-all: export FAULTS := all
test-all: export KUBERNETES := all
test-all: export GITOPS := all
test-all: export MONITORING := all
test-all: export KIND := all
test-all: ## run all tests with every switch; about two hours
	@failed=0; $(MAKE) test || failed=1; $(MAKE) test-clusters || failed=1; exit $$failed  # one run shows every failure

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
	@$(MAKE) wheel

wheel: ## build the Python package into dist/
	@python3 -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

crds: ## generate the CRD in crds/ and in the chart from the models
	@.ci/install operator,dev
	@$(PY) -m finetune_operator.crd.generate

docs: ## generate the pages of docs/reference that come from the code, and the chart's README
	@.ci/install operator,dev
	@$(PY) .ci/generate.py

site: ## build the docs as a site into build/site, with search; a dead link or anchor is an error
	@.ci/install site
	@.venv/bin/sphinx-build $(SITE)
	@echo "build/site/index.html"

clean: ## delete .venv, .demo and .finetune
	rm -rf .venv .demo .finetune

.PHONY: help demo unit test test-clusters test-all check cluster cluster-deps images release wheel crds docs site clean

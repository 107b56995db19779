# Two commands need nothing but python3 (3.11 or newer), make and the package registries:
#   make train    the main job: MNIST through the functional core and back to Keras
#   make test     ruff, mypy, pytest (with the doctests)
# make test-slow runs the tests that take seconds each, make test-all all of them; make bench compares
# with the peers (ARGS=--quick: 3 minutes).
# PYTHON=python3.13 picks another interpreter; CONSTRAINTS= (empty) takes the newest releases.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2

BIN := $(VENV)/bin
WANTED := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
READY := $(VENV)/.ready-$(WANTED)-$(or $(CONSTRAINTS),newest)

export KERAS_BACKEND := jax

.PHONY: train test test-slow test-all test-adapters test-ray test-wheel smoke docs guides bench bench-peers bench-hub bench-gpu lint clean

train: $(READY)
	$(BIN)/python examples/mnist.py

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not long and not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not long" tests

test-all: lint
	TIMES_AS_MANY_EXAMPLES=4 $(BIN)/python -m pytest -n $(WORKERS)

# Data and callbacks of other libraries, in an environment that has them.
test-adapters: .venv-adapters/.ready
	.venv-adapters/bin/python -m pytest -n $(WORKERS) -m adapters tests

# A run within Ray, in an environment that has it.
test-ray: .venv-ray/.ready
	.venv-ray/bin/python -m pytest -m ray tests/distributed/test_ray.py

smoke: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m smoke tests

# The wheel of the sdist, installed in an empty environment, imported and trained with elsewhere.
test-wheel: $(READY)
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) dist/*.whl
	away=$$(mktemp -d) && cd "$$away" && "$(CURDIR)/.venv-wheel/bin/python" -I "$(CURDIR)/.ci/smoke.py" && rm -r "$$away"

# The site, into docs/_build/html: every block of every page is run, every example for a short time.
docs: $(READY)
	$(BIN)/python -m sphinx -b html -W --keep-going -j 2 docs docs/_build/html $(ARGS)

# Runs examples in full, for the site: ARGS="text vae" two of them; all take hours, dcgan most of them.
guides: $(READY)
	$(BIN)/python docs/_ext/full_runs.py $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.saving
	$(BIN)/python -m benchmarks.logging
	$(BIN)/python -m benchmarks.population
	$(BIN)/python -m benchmarks.predict $(filter --quick,$(ARGS)) $(PEERS)

# Those whose environments have been made: see bench-peers.
PEERS = $(foreach peer,tensorflow torch,$(if $(wildcard .venv-$(peer)/.ready),--python $(peer)=.venv-$(peer)/bin/python))

# Keras on TensorFlow and on torch, in environments of their own.
bench-peers: $(READY) .venv-tensorflow/.ready .venv-torch/.ready
	$(BIN)/python -m benchmarks --python tensorflow=.venv-tensorflow/bin/python \
	  --python torch=.venv-torch/bin/python --output benchmarks/output/peers $(ARGS)

# On a machine with a GPU, and jax for it; ARGS=--quick runs anywhere.
bench-gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

# Models of keras-hub, with random weights, in an environment that has it.
bench-hub: .venv-hub/.ready
	.venv-hub/bin/python -m benchmarks.applications --set hub $(ARGS)

.venv-tensorflow/.ready .venv-torch/.ready .venv-adapters/.ready .venv-ray/.ready .venv-hub/.ready: .venv-%/.ready:
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet --constraint constraints.txt $(IN_$*)
	@touch $@

IN_tensorflow := keras tensorflow-cpu
IN_torch := keras torch
IN_adapters := --editable '.[test,wandb,optuna]' tensorflow-cpu torch torchdata nbclient ipykernel
IN_ray := --editable '.[test]' 'ray[train]'
IN_hub := --editable . keras-hub # brings TensorFlow, which it imports

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "functrain needs Python 3.11 or newer; $(PYTHON) is $(WANTED). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/output

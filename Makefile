# Two commands need nothing but Python (3.11 or newer), make and the package registries:
#   make train    the main job: MNIST through the functional core and back to Keras
#   make test     ruff, mypy, pytest (with the doctests)
# make test-slow runs the tests that take seconds each, make test-all all of them; make durations
# measures which those are; make test-tpu looks at programs for TPUs; make bench compares with the
# peers (ARGS=--quick: small workloads).
# They take the newest Python from 3.12 to 3.14 that is found, and python3 otherwise. PYTHON=python3.11
# picks another one, and CONSTRAINTS= (empty) takes the newest releases of the packages.

ifndef PYTHON
PYTHON := $(or $(shell .ci/newest_python),python3)
endif
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2

BIN := $(VENV)/bin
WANTED := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
READY := $(VENV)/.ready-$(WANTED)-$(or $(CONSTRAINTS),newest)

# A worker takes tests from one that is behind, and otherwise has whole files, whose programs it has.
SPREAD := -n $(WORKERS) --dist=worksteal
PYTEST := $(BIN)/python -m pytest $(SPREAD)

export KERAS_BACKEND := jax
# Without bytecode every worker compiles the packages, and rewrites all tests, each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-quick test-slow test-all durations test-adapters test-ray test-slurm test-remote test-trackers test-tpu test-cuda test-wheel smoke smoke-head docs guides bench bench-peers bench-hub bench-gpu bench-targets lint ruff mypy clean

train: $(READY)
	$(BIN)/python examples/mnist.py

# mypy runs beside pytest, and takes the core that is idle while the workers begin and end.
test: $(READY) ruff
	@$(MAKE) --no-print-directory -j 2 mypy test-quick

test-quick: $(READY)
	$(PYTEST) -m "not long and not slow"

test-slow: $(READY)
	$(PYTEST) -m "slow and not long" tests

test-all: lint
	TIMES_AS_MANY_EXAMPLES=4 $(PYTEST)

# Writes tests/durations.json: the processor time of each test that takes half a second or more. Of tests
# that share a program the first one compiles it: without the slow ones, others are the first.
durations: $(READY)
	echo '{}' > tests/durations.json
	$(PYTEST) -m "not long" --measure
	$(PYTEST) -m "not long and not slow" --measure

# Data and callbacks of other libraries, in an environment that has them.
test-adapters: .venv-adapters/.ready
	.venv-adapters/bin/python -m pytest $(SPREAD) -m adapters tests

# Runs within Ray, in an environment that has it. ARGS="-m ray" adds the 20 kills.
test-ray: .venv-ray/.ready
	.venv-ray/bin/python -m pytest -m "ray and not long" tests/distributed/test_ray.py $(ARGS)

# Jobs of a real Slurm on this machine: `sudo .ci/slurm start` before, and `sudo .ci/slurm stop` after.
# ARGS="-m slurm" adds the 20 kills.
test-slurm: $(READY)
	$(BIN)/python -m pytest -m "slurm and not long" tests/distributed/test_slurm.py $(ARGS)

# Checkpoints in emulations of object stores, in an environment that has them. ARGS="-m remote" adds
# the 100 kills.
test-remote: .venv-remote/.ready
	.venv-remote/bin/python -m pytest $(SPREAD) -m "remote and not long" tests/checkpoint $(ARGS)

# Experiment trackers and their offline modes, in an environment that has them.
test-trackers: .venv-trackers/.ready
	.venv-trackers/bin/python -m pytest -m trackers tests/hooks $(ARGS)

# Programs for TPUs and NVIDIA GPUs, from their compilers, which need no device. ARGS="-m tpu" adds
# those that take long.
test-tpu test-cuda: test-%: .venv-%/.ready
	JAX_PLATFORMS=cpu PYTHONPATH="$(CURDIR)/.venv-$*" $(PYTEST) -m "$* and not long" tests/targets tests/benchmarks/test_targets.py $(ARGS)

smoke: $(READY)
	$(PYTEST) -m smoke tests

# With a development version, as in HEAD=git+https://github.com/jax-ml/jax or HEAD=keras-nightly, whose
# files are in the place of Keras's; VENV= keeps it apart.
smoke-head: $(READY)
	$(if $(filter keras%,$(HEAD)),$(BIN)/python -m pip uninstall --quiet --yes keras)
	$(BIN)/python -m pip install --quiet "$(HEAD)"
	$(PYTEST) -m smoke tests

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
# finetune needs keras-hub: make .venv-hub/.ready; .venv-hub/bin/python docs/_ext/full_runs.py finetune
guides: $(READY)
	$(BIN)/python docs/_ext/full_runs.py $(ARGS)

# ARGS=--update writes into benchmarks/results instead of benchmarks/output, and says at the end which
# figures of the pages have changed.
bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS) $(PEERS)
	$(BIN)/python -m benchmarks.predict $(filter --quick --update,$(ARGS)) $(PEERS)
	$(BIN)/python -m benchmarks.population $(filter --quick --update,$(ARGS))
	$(BIN)/python -m benchmarks.first_step $(filter --quick --update,$(ARGS))
	$(BIN)/python -m benchmarks.saving $(filter --update,$(ARGS))
	$(BIN)/python -m benchmarks.logging $(filter --update,$(ARGS))
	$(if $(filter --update,$(ARGS)),$(BIN)/python -m benchmarks.chart)
	$(if $(filter --update,$(ARGS)),-$(BIN)/python -m benchmarks.figures)

# Those whose environments have been made: see bench-peers.
PEERS = $(foreach peer,tensorflow torch keras-head,$(if $(wildcard .venv-$(peer)/.ready),--python $(peer)=.venv-$(peer)/bin/python))

# With PyTorch, Keras on TensorFlow and on torch, and Keras's next release, in environments of their own.
bench-peers: $(READY) .venv-tensorflow/.ready .venv-torch/.ready .venv-keras-head/.ready
	$(MAKE) bench

# On a machine with a GPU, and jax for it; ARGS=--quick runs anywhere.
bench-gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

# What the compilers for TPUs and NVIDIA GPUs say about the workloads; no device is needed.
bench-targets: .venv-tpu/.ready .venv-cuda/.ready
	PYTHONPATH="$(CURDIR)/.venv-tpu:$(CURDIR)/.venv-cuda" $(BIN)/python -m benchmarks.targets $(ARGS)

# Models of keras-hub, with random weights, in an environment that has it.
bench-hub: .venv-hub/.ready
	.venv-hub/bin/python -m benchmarks.applications --set hub $(ARGS)

.venv-tensorflow/.ready .venv-torch/.ready .venv-keras-head/.ready .venv-adapters/.ready .venv-ray/.ready .venv-hub/.ready: .venv-%/.ready:
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) $(IN_$*)
	$(if $(NOT_IN_$*),.venv-$*/bin/python -m pip uninstall --quiet --yes $(NOT_IN_$*))
	@touch $@

# Object stores and trackers need older releases of some packages than the other environments have. In
# one call, pip does not find the releases that it finds in two.
.venv-remote/.ready .venv-trackers/.ready: .venv-%/.ready: constraints.txt
	$(PYTHON) -m venv --clear .venv-$*
	grep -E '^(jax|jaxlib|flax|optax|chex|keras|numpy|orbax-checkpoint|pytest)' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --constraint .venv-$*/constraints.txt --editable '.[test,$(EXTRAS_$*)]'
	$(if $(IN_$*),.venv-$*/bin/python -m pip install --quiet --constraint .venv-$*/constraints.txt $(IN_$*))
	@touch $@

# Only a compiler, beside the packages of $(VENV): all of jax[cuda12] takes 5 GB.
.venv-tpu/.ready .venv-cuda/.ready: .venv-%/.ready: $(READY)
	rm -rf .venv-$*
	wanted="$$($(BIN)/python .ci/compilers.py $*)" && \
	  $(BIN)/python -m pip install --quiet --no-deps --target .venv-$* $$wanted
	@touch $@

IN_tensorflow := keras tensorflow-cpu
IN_torch := keras torch
IN_keras-head := keras-nightly jax
IN_adapters := --editable '.[test,wandb,optuna]' keras-hub torch torchdata transformers peft nbclient ipykernel kubeflow-trainer-api pyyaml # keras-hub brings TensorFlow
NOT_IN_adapters := triton # PyTorch can do without it; with TensorFlow in one process it crashes
EXTRAS_remote := remote
IN_remote := s3fs gcsfs 'moto[server]' gcp-storage-emulator
EXTRAS_trackers := wandb,mlflow,trackio,comet
IN_ray := --editable '.[test,ray]'
IN_hub := --editable '.[plot]' keras-hub # brings TensorFlow, which it imports

lint: ruff mypy

ruff: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(READY)
	$(BIN)/mypy

$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "functrain needs Python 3.11 or newer; $(PYTHON) is $(WANTED). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/output

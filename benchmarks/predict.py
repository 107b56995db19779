"""Compares the speed of predictions with Keras on its backends.

The options are those of `python -m benchmarks`.

python -m benchmarks.predict --quick
python -m benchmarks.predict --python torch=.venv-torch/bin/python
"""

import sys

from benchmarks.__main__ import Suite, main
from benchmarks.ways import PREDICTING
from benchmarks.workloads import WORKLOADS

NAMES = ("digits-mlp", "lstm", "transformer", "mnist-convnet", "residual", "mobilenet-v2")
SELECTED = {name: WORKLOADS[name] for name in NAMES}
SUITE = Suite("benchmarks.predict", __doc__, PREDICTING, SELECTED, "results-predict")

if __name__ == "__main__":
    sys.exit(main(suite=SUITE))

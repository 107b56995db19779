"""Compares the speed of predictions with Keras on its backends.

The options are those of `python -m benchmarks`.

python -m benchmarks.predict --quick
python -m benchmarks.predict --python torch=.venv-torch/bin/python
"""

import sys

from benchmarks.__main__ import OUTPUT, Known, main
from benchmarks.ways import PREDICTING
from benchmarks.workloads import WORKLOADS

NAMES = ("digits-mlp", "lstm", "transformer", "mnist-convnet", "residual", "mobilenet-v2")
SHOWN = {name: WORKLOADS[name] for name in NAMES}
KNOWN = Known("benchmarks.predict", __doc__, PREDICTING, SHOWN, OUTPUT / "predict")

if __name__ == "__main__":
    sys.exit(main(known=KNOWN))

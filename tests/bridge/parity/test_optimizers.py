"""Every optimizer of Keras, and what goes around one."""

from typing import Any

from keras import optimizers

from tests.bridge import parity
from tests.bridge.optimizer_cases import CASES as OPTIMIZERS
from tests.bridge.parity import dense

CASES = parity.Cases()
SCHEDULES = optimizers.schedules
RESTARTS = SCHEDULES.CosineDecayRestarts(0.1, 4)
WARMUP = SCHEDULES.CosineDecay(0.0, 9, warmup_target=0.1, warmup_steps=4)
PIECES = SCHEDULES.PiecewiseConstantDecay([3, 8], [0.1, 0.01, 0.001])
MORE = {
    "averages": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
    "warmup": lambda: optimizers.SGD(WARMUP),
    "piecewise": lambda: optimizers.SGD(PIECES),
    "restarts": lambda: optimizers.SGD(RESTARTS),
    "inverse_time": lambda: optimizers.Adam(SCHEDULES.InverseTimeDecay(0.1, 3, 0.5)),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "accumulation_and_averages": lambda: optimizers.Adam(
        0.01, gradient_accumulation_steps=3, use_ema=True, ema_overwrite_frequency=5
    ),
    # The first scales are far too large for float16: those steps are left out, and it is halved.
    "loss_scale_that_overflows": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=2.0**127, dynamic_growth_steps=4
    ),
    "loss_scale_of_averages": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5), dynamic_growth_steps=2
    ),
}
CASES.table(
    every_run="loss_scale_that_overflows accumulation",
    **{
        name: lambda make=make: dense(compiled={"optimizer": make()})
        for name, make in {**OPTIMIZERS, **MORE}.items()
    },
)


@CASES.each
def test_fit_equals_keras_to_the_bit_whatever_is_fused(make: Any, fuse: Any) -> None:
    parity.assert_fits_as_keras(make, fuse)

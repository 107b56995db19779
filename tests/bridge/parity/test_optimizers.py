"""Every optimizer of Keras, and what goes around one."""

from typing import Any

from keras import optimizers

from tests.bridge import parity
from tests.bridge.parity import Case, dense

CASES = parity.Cases()


def without_decay_of_biases() -> Any:
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


MAKERS = {
    "adam": lambda: optimizers.Adam(),
    "sgd": lambda: optimizers.SGD(0.05),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "nadam": lambda: optimizers.Nadam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "ftrl": lambda: optimizers.Ftrl(0.05),
    "lion": lambda: optimizers.Lion(0.001),
    "lamb": lambda: optimizers.Lamb(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.05),
    "muon": lambda: optimizers.Muon(0.01),
    "ema": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "ema_overwriting": lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "exponential": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
    "cosine": lambda: optimizers.SGD(
        optimizers.schedules.CosineDecay(0.0, 9, warmup_target=0.1, warmup_steps=4)
    ),
    "piecewise": lambda: optimizers.SGD(
        optimizers.schedules.PiecewiseConstantDecay([3, 8], [0.1, 0.01, 0.001])
    ),
    "free_of_schedules": lambda: optimizers.ScheduleFreeAdamW(0.01, warmup_steps=3),
    "decay_but_of_biases": without_decay_of_biases,
    "inverse_time": lambda: optimizers.Adam(optimizers.schedules.InverseTimeDecay(0.1, 3, 0.5)),
    "restarts": lambda: optimizers.SGD(optimizers.schedules.CosineDecayRestarts(0.1, 4)),
    "accumulation_on_a_schedule": lambda: optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), gradient_accumulation_steps=4
    ),
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
        for name, make in MAKERS.items()
    },
)


@CASES
def one_optimizer_for_each_layer() -> Case:
    each = optimizers.OptimizerMap(optimizers.SGD(0.1))
    each["dense/.*"] = optimizers.Adam(0.01)
    return dense(compiled={"optimizer": optimizers.MultiOptimizer(each)})


@CASES.each
def test_fit_equals_keras_to_the_bit_whatever_is_fused(make: Any, fuse: Any) -> None:
    parity.assert_fits_as_keras(make, fuse)

"""What `compile` was asked for, which Keras does not keep."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer


def jit_compile_asked(model: keras.Model) -> Any:
    """Returns the `jit_compile` that the last `compile` was given; None where that is not known.

    Wraps `Trainer.compile`, which keeps nothing but what it made of it: a False may have been
    asked for, or be what "auto" came to. The wrapper writes the argument down and changes nothing
    else; checked with Keras 3.15.1. Not known of models compiled before bridge was imported.
    """
    return vars(model).get("_bridge_jit_compile")


def _writing_down_jit_compile(compile_model: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(compile_model)

    @functools.wraps(compile_model)
    def compile_and_write_down(self: Any, *args: Any, **kwargs: Any) -> None:
        compile_model(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        vars(self)["_bridge_jit_compile"] = given.get("jit_compile", "auto")

    return compile_and_write_down


Trainer.compile = _writing_down_jit_compile(Trainer.compile)

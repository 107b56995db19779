"""Which values are better when they are larger: decided by `mode`, or by a value's name."""

import re
from typing import Literal, TypeAlias, get_args

from functrain.common._checks import require_instance, require_one_of

Mode: TypeAlias = Literal["auto", "min", "max"]

# Words of names whose values are better when they are larger, and when they are smaller.
_LARGER_IS_BETTER = (
    "accuracy acc auc auroc precision recall sensitivity specificity f1 fbeta iou miou dice map "
    "psnr ssim bleu rouge r2 reward return"
)
_SMALLER_IS_BETTER = (
    "loss error err mse rmse mae mape msle mase nll perplexity ppl bpd crossentropy kl divergence "
    "wer cer fid distance hinge"
)
_SIGNS = dict.fromkeys(_LARGER_IS_BETTER.split(), -1.0)
_SIGNS |= dict.fromkeys(_SMALLER_IS_BETTER.split(), 1.0)


def sign(name: str, mode: Mode) -> float:
    """Returns 1.0 if smaller values are better, -1.0 if larger values are.

    Args:
      name: The name of a value. In mode ``"auto"`` the last of its words that is in the lists above
        decides.
      mode: ``"min"``, ``"max"`` or ``"auto"``.

    Raises:
      TypeError: The name is not a text.
      ValueError: The mode is unknown, or it is ``"auto"`` and no word of the name is in the lists.

    Examples:
      >>> sign("val_loss", "auto"), sign("val/top5_accuracy", "auto"), sign("score", "max")
      (1.0, -1.0, -1.0)
    """
    require_instance("monitor", name, str, "the name of a value, such as 'val_loss'")
    require_one_of("mode", mode, get_args(Mode))
    if mode != "auto":
        return 1.0 if mode == "min" else -1.0
    # The last word decides: "error_precision" is a precision, "precision_error" is an error.
    for word in reversed(re.split("[^a-z0-9]+", name.lower())):
        if word in _SIGNS:
            return _SIGNS[word]
    raise ValueError(
        f"mode: expected 'min' or 'max' for {name!r}, since its name does not tell which is "
        "better, got 'auto'."
    )

"""Whether more is better: told by a value's name."""

import re
from typing import Literal, TypeAlias, get_args

from functrain.common._checks import require_one_of

Mode: TypeAlias = Literal["auto", "min", "max"]

_MORE = (
    "accuracy acc auc auroc precision recall sensitivity specificity f1 fbeta iou miou dice map "
    "psnr ssim bleu rouge r2 reward return"
)
_LESS = (
    "loss error err mse rmse mae mape msle mase nll perplexity ppl bpd crossentropy kl divergence "
    "wer cer fid distance hinge"
)
_SIGNS = dict.fromkeys(_MORE.split(), -1.0) | dict.fromkeys(_LESS.split(), 1.0)


def sign(name: str, mode: Mode) -> float:
    """Returns 1.0 where less is better, -1.0 where more is; the last word known in a name tells.

    Raises:
      ValueError: The mode is none, or `"auto"` and the name does not tell.

    Examples:
      >>> sign("val_loss", "auto"), sign("val/top5_accuracy", "auto"), sign("score", "max")
      (1.0, -1.0, -1.0)
    """
    require_one_of("mode", mode, get_args(Mode))
    if mode != "auto":
        return 1.0 if mode == "min" else -1.0
    found = [_SIGNS[word] for word in re.split("[^a-z0-9]+", name.lower()) if word in _SIGNS]
    if not found:
        raise ValueError(
            f"mode: expected 'min' or 'max' for {name!r}, whose name does not tell which is "
            "better, got 'auto'."
        )
    return found[-1]

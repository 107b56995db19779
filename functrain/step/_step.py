"""MeteredStep's old place."""

from functrain.step._metered import MeteredStep as MeteredStep

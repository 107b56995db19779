"""fit: a run with hooks, evaluation, progress and history.

Files:
  _fit: the loop most people want
  _ahead: what is found before the first step
  _history: what a fit reported, and how a notebook shows it
  _recorder: gathers it while the run goes on
  _bar: a line that is drawn anew
  _progress: a bar in a terminal or notebook, lines elsewhere
  _plot: learning curves
"""

from functrain.trainer._fit import FitResult as FitResult
from functrain.trainer._fit import fit as fit
from functrain.trainer._history import History as History

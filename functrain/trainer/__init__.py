"""fit: a run with hooks, evaluation, progress and history."""

"""Values, pictures and texts for MLflow."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from functrain.common._library import import_optional
from functrain.hooks._tracker import Tracker


class MLflow(Tracker):
    """A hook that logs to MLflow.

    Names are those of `functrain.hooks.TensorBoard`; MLflow's step is the training step. The values
    of a step are exact, and are logged one program late. Pictures and texts of a `Sample` are
    artifacts, such as ``samples/sample-00001200.png``. Select the store and the experiment as for
    any MLflow run, by ``mlflow.set_tracking_uri`` and ``mlflow.set_experiment`` or by environment
    variables. While the training runs, ``mlflow.log_params`` and others log to the same run.

    A run that a `functrain.Checkpointer` resumes continues the same MLflow run, without a missing
    or a repeated step.

    Args:
      every: The logs of every `every`-th step are logged.
      **start_run: Arguments of ``mlflow.start_run``: ``run_name="first", tags={...}``.

    Raises:
      ValueError: `every` is not a positive integer.
      ImportError: MLflow is not installed.

    Attributes:
      run: MLflow's ``ActiveRun`` while it is active, else None.

    Examples:
      >>> hooks = [MLflow(run_name="first")]  # doctest: +SKIP
    """

    def __init__(self, *, every: int = 100, **start_run: Any) -> None:
        super().__init__(every=every)
        self.start_run = start_run
        hint = "MLflow needs its library: pip install 'functrain[mlflow]'"
        self._mlflow = import_optional("mlflow", hint)
        self._client: Any = None

    def start(self, run_id: str | None) -> tuple[str, Mapping[str, int]]:
        """Starts an MLflow run, or continues the one with an id."""
        resumed = {} if run_id is None else {"run_id": run_id}
        self.run = self._mlflow.start_run(**{**self.start_run, **resumed})
        self._client = self._mlflow.MlflowClient()
        run_id = self.run.info.run_id
        # MLflow keeps both values if a step is logged twice. A run has the last value of each name.
        metrics = self._client.get_run(run_id).data.to_proto().metrics
        return run_id, {metric.key: metric.step for metric in metrics}

    def log(
        self, step: int, values: dict[str, float], samples: dict[str, np.ndarray | str]
    ) -> None:
        """Logs what belongs to a step; MLflow has it when this returns."""
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, float(x), now, step) for name, x in values.items()]
        # Whatever MLFLOW_ENABLE_ASYNC_LOGGING says: a checkpoint must not be ahead of MLflow.
        self._client.log_batch(self.run_id, metrics, synchronous=True)
        for name, sample in samples.items():
            path = f"samples/{name}-{step:08d}"
            # A step that is logged again replaces its file.
            if isinstance(sample, str):
                self._client.log_text(self.run_id, sample, f"{path}.txt")
            else:
                self._client.log_image(self.run_id, sample, f"{path}.png")

    def finish(self) -> None:
        """Ends the MLflow run."""
        self._mlflow.end_run()

"""Data that are divided over the processes."""

from typing import Any

from jax.sharding import NamedSharding

from functrain.data._local import Local


def local(data: Any, sharding: NamedSharding) -> Local:
    """Marks data as this process's part of a data set.

    Without it, all processes have the same data, and each uses the part for its devices. With it,
    no process reads the data of another: a batch consists of the batches of all processes, each of
    ``batch_size / processes`` examples, joined by `jax.make_array_from_process_local_data`. The
    data themselves choose the part of a process: with grain ``dataset[jax.process_index() ::
    jax.process_count()]`` or, in a `DataLoader`, ``grain.sharding.ShardByJaxProcess()``.

    Before each chunk the processes compare how many batches they have, so that all of them raise an
    error if those differ; this waits for the chunk before. A checkpoint stores the position of each
    process in its part: resume with the same number of processes.

    Args:
      data: The part of this process, in batches: an `ArrayLoader`, or an iterable, as for
        `functrain.run`.
      sharding: Sharding of a whole batch, such as ``NamedSharding(mesh, PartitionSpec("data"))``;
        the one that `fit` is given. It divides examples over all processes.

    Returns:
      Data for `fit` (``eval_data=``, too), `run`, `evaluate` and `predict`, whose outputs are in
      the order of the batches, and within a batch in the order of the mesh; and for the functions
      of `bridge`, in place of x.

    Raises:
      TypeError: `sharding` is not a NamedSharding.
      ValueError: Some processes would have the same part. In a run, also if processes have
        different numbers of batches, or batches of different shapes; it is raised in all of them.

    Examples:
      >>> import functrain as ft, jax, numpy as np
      >>> mesh = ft.sharding.mesh({"data": -1})
      >>> rows = jax.NamedSharding(mesh, jax.P("data"))
      >>> part = np.arange(64.0)[jax.process_index() :: jax.process_count()]
      >>> def step(total, batch):
      ...     return total + batch.sum(), {}
      >>> data = ft.distributed.local(ft.ArrayLoader(part, 8), rows)
      >>> float(ft.fit(0.0, step, data, sharding=rows, verbose=0).state)
      2016.0
    """
    return Local(data, sharding)

"""Data of which each process has a part."""

from typing import Any

from jax.sharding import NamedSharding

from functrain.data._local import Local


def local(data: Any, sharding: NamedSharding) -> Local:
    """Says of data that each process has a part of its own.

    Without it all processes have the same data, of which each takes its devices' part. With it
    nobody reads what others need: a batch is what all processes give together, each
    ``batch_size / processes`` examples, put together by `jax.make_array_from_process_local_data`.
    Which part a process has is up to its data, with grain ``dataset[jax.process_index() ::
    jax.process_count()]`` or, in a `DataLoader`, ``grain.sharding.ShardByJaxProcess()``.

    Before each chunk the processes compare how many batches they have, so that all of them say so
    where those differ; that waits for the chunk before. A checkpoint keeps where each process is in
    its part: it goes on in as many processes as wrote it.

    Args:
      data: What this process has, in batches: an `ArrayLoader`, or an iterable, as for
        `functrain.run`.
      sharding: Of a whole batch, such as ``NamedSharding(mesh, PartitionSpec("data"))``; the one
        that `fit` is given. It divides examples over all processes.

    Returns:
      Data for `fit` (``eval_data=``, too), `run`, `evaluate` and `predict`, whose outputs come by
      batches, in each in the order of the mesh; and for those of `bridge`, in the place of x.

    Raises:
      TypeError: `sharding` is none.
      ValueError: Some processes would hold the same part. And in a run, in every process: they
        have unequally many batches, or batches of other shapes.

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

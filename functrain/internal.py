"""Private helpers that functrain shares with `bridge` only: they may change with any release.

This is the only module from which `bridge` imports private names; a test checks that.
"""

from functrain.checkpoint._files import resolve_path as resolve_path
from functrain.checkpoint._orbax import find_items as find_items
from functrain.checkpoint._sources import open_arrays as open_arrays
from functrain.common import _tree
from functrain.common._checks import is_number as is_number
from functrain.common._checks import require as require
from functrain.common._checks import require_instance as require_instance
from functrain.common._checks import require_integer as require_integer
from functrain.common._checks import require_no_problems as require_no_problems
from functrain.common._checks import require_one_of as require_one_of
from functrain.common._gather import fetch_global as fetch_global
from functrain.common._repr import brief as brief
from functrain.common._repr import call as call
from functrain.common._tree import signature as signature
from functrain.common._types import PyTree as PyTree
from functrain.common._types import StepTraits as StepTraits
from functrain.common._warnings import warn as warn
from functrain.common._wide_integers import is_cheap_to_read as is_cheap_to_read
from functrain.common._wide_integers import require_integers_fit as require_integers_fit
from functrain.data._arrays import host_batch as host_batch
from functrain.data._batches import Batches as Batches
from functrain.data._batches import Chunk as Chunk
from functrain.data._local import Local as Local
from functrain.data._local import LocalBatches as LocalBatches
from functrain.data._lookahead import Lookahead as Lookahead
from functrain.data._on_device import OnDevice as OnDevice
from functrain.data._on_device import has_room as has_room
from functrain.data._stack import copy_batch as copy_batch
from functrain.data._stack import pad_chunk as pad_chunk
from functrain.data._stack import stack_batches as stack_batches
from functrain.engine._guards import add_guard as add_guard
from functrain.engine._placement import chunk_placer as chunk_placer
from functrain.engine._placement import require_divisible as require_divisible
from functrain.engine._plan import FuseArg as FuseArg
from functrain.engine._plan import nbytes as nbytes
from functrain.engine._plan import require_fuse as require_fuse
from functrain.engine._signals import DeferredSignals as DeferredSignals
from functrain.hooks._hook import HookRunner as HookRunner
from functrain.hooks._hook import by_identity as by_identity
from functrain.hooks._hook import is_resumable as is_resumable
from functrain.hooks._logger import Logger as Logger
from functrain.loop._arguments import RunArguments as RunArguments
from functrain.loop._events import ChunkBegin as ChunkBegin
from functrain.loop._events import EpochBegin as EpochBegin
from functrain.loop._events import fetch_rows as fetch_rows
from functrain.loop._events import row_of_step as row_of_step
from functrain.loop._loop import Loop as Loop
from functrain.loop._passes import fetch_outputs as fetch_outputs
from functrain.loop._passes import prediction_plan as prediction_plan
from functrain.loop._saving import Saving as Saving
from functrain.metrics._metric import labels_of as labels_of
from functrain.metrics._metric import require_labels as require_labels
from functrain.rewrites import Mode as Mode
from functrain.rewrites import resolve_mode as resolve_mode
from functrain.rewrites._compile import jit as jit
from functrain.sharding._rules import require_fitting_spec as require_fitting_spec
from functrain.step._notes import error_notes as error_notes
from functrain.step._state import check_tx as check_tx
from functrain.targets._chips import accelerator_of as accelerator_of
from functrain.tx._extra_args import with_any_extra_args as with_any_extra_args

tree = _tree

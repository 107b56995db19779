"""What Keras's private names for batches mean (checked with Keras 3.15.1)."""

from bridge import keras_private  # isort: skip  # before keras: it chooses the backend

import itertools

import numpy as np
import pytest

from tests.bridge.keras_private.models import epochs


def test_epoch_iterator_yields_steps_and_an_iterator_of_batches():
    all_epochs = epochs()
    steps = [(a, b, all_epochs.batch_of(next(items))[0].shape) for a, b, items in all_epochs]
    assert steps == [(0, 0, (4, 3)), (1, 1, (4, 3)), (2, 2, (2, 3))]


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_array_adapter_is_read_in_the_order_of_its_own_iterator(shuffle):
    iterator = epochs(shuffle=shuffle)
    np.random.seed(0)
    theirs = [x for x, _ in iterator.data_adapter.get_jax_iterator()]
    np.random.seed(0)
    ours = [iterator.arrays.take([rows])[0][0] for rows in iterator.arrays]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_sizes_of_batches_are_those_of_its_own_iterator():
    for size, examples in itertools.product((4, 5, 10, 12), (10, 1)):
        found = epochs(x=np.ones((examples, 3)), y=np.ones(examples), batch_size=size)
        lengths = [len(x) for x, _ in found.data_adapter.get_jax_iterator()]
        assert found.arrays.sizes == sorted(set(lengths), reverse=True)


def test_train_validation_split_takes_the_last_part():
    kept, left = keras_private.data.split_validation((np.arange(10), None), 0.3)
    assert [len(kept[0]), len(left[0])] == [7, 3]


def batches_of(found, number):
    return [np.asarray(next(found)) for _ in range(number)]


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_an_iterator_that_lasts_for_epochs_is_found_again(shuffle):
    np.random.seed(0)
    straight = epochs(steps_per_epoch=1, shuffle=shuffle)
    straight.is_tracked = True
    for _ in range(2):
        for _, _, iterator in straight:
            batches_of(iterator, 1)
    place = keras_private.data.epoch_position(straight)
    rest = [x for _, _, iterator in straight for x in batches_of(iterator, 1)]
    np.random.seed(7)
    again = epochs(steps_per_epoch=1, shuffle=shuffle)
    keras_private.data.restore_position(again, place)
    found = [x for _, _, iterator in again for x in batches_of(iterator, 1)]
    np.testing.assert_array_equal(found, rest)


def test_arrays_are_described_by_what_makes_their_batches():
    found = keras_private.data.fingerprint(epochs(shuffle="batch"))
    assert found["data"] == "ArrayDataAdapter"
    assert (found["examples"], found["batch_size"], found["shuffle"]) == (10, 4, "batch")
    assert found["arrays"][0] == "float32[3]"


def test_a_data_frame_is_described_by_the_dtype_of_its_batches():
    frame = pytest.importorskip("pandas").DataFrame({"a": [1, 2], "b": [0.5, 1.5], "c": [3, 4]})
    found = keras_private.data.fingerprint(epochs(x=frame, y=np.ones(2)))
    assert found["arrays"][0] == "float32[3]"

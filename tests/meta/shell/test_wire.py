"""A message arrives as it was sent, with its arrays."""

import socket
from typing import Any

import numpy as np
import pytest

from specverify.isolation.wire import SMALL, Wire

ARRAYS = {
    "fractions": np.arange(6.0).reshape(2, 3),
    "no numbers": np.empty((0, 3), np.float32),
    "truths": np.array([True, False]),
    "one number": np.array(7),
    "columns first": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "bytes in the other order": np.arange(4, dtype=np.dtype(np.float64).newbyteorder()),
    "more than is small": np.arange(SMALL, dtype=np.int64),
    "words": np.array(["tree", "node"]),
}


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_arrives_as_it_was_sent(name: str, writable: bool) -> None:
    sent = ARRAYS[name].copy(order="K")
    sent.flags.writeable = writable
    sender, receiver = map(Wire, socket.socketpair())
    sender.send(("told", sent))
    received: Any = receiver.receive()[1]
    assert (received.dtype, received.shape, received.flags.writeable) == (sent.dtype, sent.shape, writable)
    assert np.array_equal(received, sent)
    sender.close()
    receiver.close()

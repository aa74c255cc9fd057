"""`Snapshot`: whether tensors are still what they were when something was made of them."""

import pytest
import torch

from mmattn.cache import Snapshot


@pytest.mark.parametrize(
    "now",
    [
        lambda x: x.add_(1),
        lambda x: x.clone(),
        lambda x: x[:1],
        lambda x: x.view(5, 3),
        lambda x: x.as_strided((3, 5), (1, 3)),
        lambda x: x.view(torch.int32),
    ],
    ids=["edited", "copied", "fewer rows", "other shape", "other strides", "other dtype"],
)
def test_another_reading_of_the_same_storage_is_another_tensor(now):
    x = torch.randn(3, 5)
    snapshot = Snapshot([x])
    assert snapshot.holds([x])
    assert not snapshot.holds([now(x)])
    assert not snapshot.holds([x, x])

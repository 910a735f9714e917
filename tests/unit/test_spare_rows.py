"""Inputs of products that compute more rows than asked: no copy where memory goes on behind them."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.spare_rows import STEP, empty_with_spare_rows, room_for, with_spare_rows


@pytest.mark.parametrize("num_rows", [1, 64, STEP, STEP + 1, 320])
def test_rows_to_spare_are_used_without_a_copy(num_rows: int) -> None:
    x = empty_with_spare_rows(num_rows, 3, torch.empty(0, dtype=torch.float16)).fill_(7.0)
    assert x.shape == (num_rows, 3)
    assert x.dtype == torch.float16
    assert x.is_contiguous()
    wanted = room_for(num_rows)
    assert wanted >= num_rows
    assert wanted % STEP == 0
    padded = with_spare_rows(x, wanted)
    assert padded.shape == (wanted, 3)
    assert padded.data_ptr() == x.data_ptr()
    assert torch.equal(padded[:num_rows], x)


def test_others_are_copied() -> None:
    """A tensor that ends with its memory; and one in the middle, whose memory ends too soon."""
    whole = torch.arange(30.0).view(10, 3)
    for x, num_rows in ((whole, 11), (whole[4:9], 7)):
        padded = with_spare_rows(x, num_rows)
        assert padded.shape == (num_rows, 3)
        assert torch.equal(padded[: len(x)], x)
        padded.fill_(0.0)
    assert torch.equal(whole, torch.arange(30.0).view(10, 3))


def test_a_slice_goes_on_in_the_tensor_that_it_is_of() -> None:
    whole = torch.arange(30.0).view(10, 3)
    assert torch.equal(with_spare_rows(whole[4:7], 6), whole[4:10])

"""The noise is the function of its contract, however it is asked for, and good enough to draw with."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels.keyed_noise import _gumbel, keyed_gumbel_reference

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
GOLDEN = [
    [0.7146806, -0.9330814, -0.2422328],
    [-0.8762334, 0.6820397, -0.698045],
]  # seed, position: (42, 0), (-1, 1000); ids 0, 1, 49151


def mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def expected_gumbel(seed: int, position: int, token_id: int, stream: int) -> float:
    key = mix((seed + (stream + 1) * GAMMA) & MASK)
    key = mix((key + (position + 1) * GAMMA) & MASK)
    bits = mix((key + (token_id + 1) * GAMMA) & MASK) >> 32
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24)))


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    noise = keyed_gumbel_reference(seeds, positions, token_ids).to(torch.float64)
    return (-(-noise).exp()).exp()  # the distribution function of the Gumbel distribution


def uniforms_along(axis: str, size: int) -> torch.Tensor:
    """[4, size]: four lines of keys, along each of which one part of the key counts up."""
    lines, varied = torch.tensor([7, 8, 1007, 1008]), torch.arange(size)
    if axis == "token_id":
        return uniforms(lines, lines + 1, varied)
    repeated = lines.repeat_interleave(size)
    varied = varied.repeat(4)
    seeds, positions = (varied, repeated) if axis == "seed" else (repeated, varied)
    return uniforms(seeds, positions, torch.tensor([7])).view(4, size)


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator for seed 1234567."""
    outputs = [mix((1234567 + step * GAMMA) & MASK) for step in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_noise_is_the_function_of_the_contract(seed: int) -> None:
    positions, token_ids = [0, 1, 4095, 131071], [0, 1, 49151, 262143]
    for stream in (0, 3):
        noise = keyed_gumbel_reference(
            torch.full((4,), seed), torch.tensor(positions), torch.tensor(token_ids), stream
        )
        expected = [[expected_gumbel(seed, p, t, stream) for t in token_ids] for p in positions]
        torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-4, atol=2e-6)


def test_noise_values_never_change() -> None:
    """Pinned: a change of these values changes the text of every seeded request."""
    noise = keyed_gumbel_reference(
        torch.tensor([42, -1]), torch.tensor([0, 1000]), torch.tensor([0, 1, 49151])
    )
    torch.testing.assert_close(noise, torch.tensor(GOLDEN), rtol=1e-6, atol=1e-6)


def test_noise_is_the_same_for_a_vocabulary_and_for_some_ids() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (5,), generator=generator)
    positions = torch.randint(0, 10000, (5,), generator=generator)
    vocab_size = 100_003  # more than is done at once
    full = keyed_gumbel_reference(seeds, positions, torch.arange(vocab_size))
    ids = torch.randint(0, vocab_size, (5, 37), generator=generator)
    assert torch.equal(keyed_gumbel_reference(seeds, positions, ids), full.gather(1, ids))
    assert torch.equal(keyed_gumbel_reference(seeds, positions, ids[0]), full[:, ids[0]])
    for row in range(5):
        alone = keyed_gumbel_reference(
            seeds[row : row + 1], positions[row : row + 1], torch.arange(vocab_size)
        )
        assert torch.equal(alone[0], full[row])


def test_noise_of_no_rows_and_of_no_ids_is_empty() -> None:
    none, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    assert keyed_gumbel_reference(none, none, torch.arange(5)).shape == (0, 5)
    assert keyed_gumbel_reference(one, one, none).shape == (1, 0)


def test_streams_are_different() -> None:
    one = torch.tensor([3])
    ids = torch.arange(1000)
    assert not torch.isclose(
        keyed_gumbel_reference(one, one, ids, 0), keyed_gumbel_reference(one, one, ids, 1)
    ).any()


def test_noise_is_finite_at_both_ends_of_the_bits() -> None:
    largest, smallest = _gumbel(torch.tensor([0, -1])).tolist()
    assert largest == pytest.approx(33 * math.log(2), abs=1e-5)
    assert smallest == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)


@pytest.mark.parametrize("axis", ["seed", "position", "token_id"])
def test_noise_is_uniform_along_every_part_of_the_key(axis: str) -> None:
    size, bins = 1 << 17, 256
    counts = torch.stack([torch.histc(line, bins, 0.0, 1.0) for line in uniforms_along(axis, size)])
    expected = size / bins
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) * (bins - 1)
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("axis", ["seed", "position", "token_id"])
def test_noise_is_uncorrelated_along_every_part_of_the_key(axis: str) -> None:
    size = 1 << 16
    values = uniforms_along(axis, size + 64) - 0.5
    for lag in (1, 2, 3, 16, 64):
        correlation = float((values[:, :size] * values[:, lag : size + lag]).mean()) * 12
        assert abs(correlation) < 4.5 / math.sqrt(4 * size)


def test_neighbouring_keys_are_independent_in_pairs() -> None:
    """16 x 16 cells of (u, u') where one part of the key differs by one."""
    size, bins = 1 << 16, 16
    base = (torch.tensor([5]), torch.tensor([9]), torch.arange(size))
    first = uniforms(*base)
    for other in (
        (base[0] + 1, base[1], base[2]),
        (base[0], base[1] + 1, base[2]),
        (base[0], base[1], base[2] + 1),
    ):
        cells = (first * bins).long() * bins + (uniforms(*other) * bins).long()
        counts = torch.bincount(cells.flatten(), minlength=bins * bins)
        expected = size / bins**2
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        freedom = bins**2 - 1
        assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)

"""Random numbers that depend on what is sampled and on nothing else."""

import numpy as np
import torch
from scipy import stats

from grpo_exp.rollout.sampling import derive_seed, sample, uniforms

LARGEST = 1.0 - 2.0**-52


def test_seeds_depend_on_every_part_and_on_the_order() -> None:
    seeds = {derive_seed(a, b) for a in range(50) for b in range(50)}
    assert len(seeds) == 2500
    assert derive_seed(3, -4) == derive_seed(3, -4)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_uniforms_are_uniform_along_rows_and_columns() -> None:
    drawn = uniforms([derive_seed(7, row) for row in range(200)], 500)
    assert drawn.shape == (200, 500)
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 0.01
    assert abs(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.01


def test_a_uniform_depends_neither_on_the_other_rows_nor_on_the_length() -> None:
    together = uniforms([11, 12, 13], 40)
    np.testing.assert_array_equal(uniforms([12], 9)[0], together[1, :9])


def test_uniforms_stay_below_one_also_as_products() -> None:
    assert uniforms(list(range(1000)), 100).max() <= LARGEST
    for total in (0.5, 0.9999999, 1.0, np.nextafter(1.0, 2.0), 1.0000001):
        assert LARGEST * total < total


def test_tokens_come_with_their_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.05, 0.15])
    drawn = sample(probabilities.log().expand(20_000, -1), torch.from_numpy(uniforms(list(range(20_000)), 1)[:, 0]))
    counts = torch.bincount(drawn, minlength=5)
    kept = probabilities > 0
    assert counts[1] == 0
    assert stats.chisquare(counts[kept].numpy(), (20_000 * probabilities[kept]).numpy()).pvalue > 0.01


def test_a_token_of_probability_zero_is_not_drawn_at_either_end() -> None:
    log_p = torch.tensor([[0.0, 0.7, 0.3, 0.0]]).log()
    assert sample(log_p, torch.tensor([0.0], dtype=torch.float64)).item() == 1
    assert sample(log_p, torch.tensor([LARGEST], dtype=torch.float64)).item() == 2


def test_a_rare_token_of_a_large_vocabulary_is_reached() -> None:
    vocabulary = 150_000
    log_p = torch.full((1, vocabulary), 1.0 / vocabulary).log()
    uniform = torch.tensor([(vocabulary - 0.5) / vocabulary], dtype=torch.float64)
    assert sample(log_p, uniform).item() == vocabulary - 1

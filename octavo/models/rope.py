"""Rotary position embeddings: which frequencies a model uses, and the table of cosines and sines. Su et al. 2021."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor`. Chen et al. 2023."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rule: waves longer than original_max_positions / low_freq_factor are stretched by `factor`, those
    shorter than original_max_positions / high_freq_factor are left alone, and between them it is blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """Each of the rotary_dim / 2 frequencies is divided by its own number: how GGUF files store Llama 3's rule."""

    divisors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | FrequencyDivisors


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """rotary_dim: the leading dimensions of a head that are rotated (all of them, in the models we have)."""

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None

    def inverse_frequencies(self) -> np.ndarray:
        """[rotary_dim / 2] float64, radians a position."""
        inverse = self.theta ** (-np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
        match self.scaling:
            case LinearScaling(factor):
                return inverse / factor
            case Llama3Scaling() as scaling:
                return _llama3(inverse, scaling)
            case FrequencyDivisors(divisors):
                return inverse / np.array(divisors)
            case _:
                return inverse


def rotary_table(rope: RopeConfig, num_positions: int) -> np.ndarray:
    """Cosines and sines for `Ops.rotary_embedding`: [num_positions, rotary_dim] float32."""
    # Frequencies and angles are rounded to float32, as where these models were trained. At position 30,000 the angle of
    # the fastest pair moves by a thousandth by that, and agreement is worth more than a better cosine.
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * rope.inverse_frequencies().astype(np.float32)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def _llama3(inverse: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    num_waves = scaling.original_max_positions * inverse / (2 * math.pi)  # in the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((num_waves - scaling.low_freq_factor) / span, 0.0, 1.0)
    return kept * inverse + (1.0 - kept) * inverse / scaling.factor

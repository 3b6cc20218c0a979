"""Drafting keeps the distribution, with everything that may be asked for; and each mistake it could hide is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.sampling.short_texts import Fault, Setting, Simulation, World, p_value

SMALLEST = 1e-4
FEW = 20_000  # texts; enough for every one of FAULTS
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4}
ALL_PARAMS = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "logit_bias": {3: 1.0}, **PENALTIES}
XTC = {"xtc_probability": 0.5, "xtc_threshold": 0.12}
LISTED = (0, 2, 3, 5, 8, 11, 12, 15)  # of 16 tokens
CASES = {
    "plain": Setting(),
    "temperature": Setting(params={"temperature": 0.7}),
    "top-p": Setting(params={"top_p": 0.8}),
    "top-k": Setting(params={"top_k": 5, "temperature": 1.3}),
    "penalties": Setting(params=PENALTIES),
    "typical-p": Setting(params={"typical_p": 0.7}),
    "XTC": Setting(params=XTC),
    "XTC, typical-p and top-k": Setting(params={**XTC, "typical_p": 0.9, "top_k": 9}, p_min=0.2, ngram=True),
    "XTC, listed, grammar": Setting(params=XTC, listed=LISTED, grammar=True),
    "p_min and n_min": Setting(p_min=0.25, n_min=2),
    "grammar": Setting(grammar=True, params={"top_p": 0.8}),
    "chain": Setting(ngram=True),
    "everything": Setting(params=ALL_PARAMS, p_min=0.2, n_min=2, grammar=True, ngram=True),
    "listed": Setting(listed=LISTED),
    "listed, p_min and top-p": Setting(listed=LISTED, p_min=0.3, params={"top_p": 0.9}),
}
DEEP = {
    "plain": Setting(depth=3, num_rows=FEW),
    "XTC": Setting(depth=3, params=XTC, num_rows=FEW),
}
FAULTS = {Fault.ONE_NOISE: "plain", Fault.LIKELY: "plain", Fault.ONE_COIN: "XTC"}


@cache
def world() -> World:
    return World()


def check(setting: Setting) -> tuple[float, Simulation]:
    simulation = Simulation(world(), setting)
    return p_value(simulation.run(), world().expected(setting)), simulation


@cache
def right(name: str) -> float:
    """The p-value of one of DEEP without a fault, which several faults are held against."""
    return check(DEEP[name])[0]


def samples() -> list:
    """A few rows of every case at one depth. In the slow tier many rows, at another depth."""
    few = [pytest.param(name, 1 + i % 4, FEW, id=f"{name}-{1 + i % 4}-few") for i, name in enumerate(CASES)]
    return few + [
        pytest.param(name, 1 + (i + 2) % 4, Setting.num_rows, id=name, marks=pytest.mark.slow)
        for i, name in enumerate(CASES)
    ]


@pytest.mark.parametrize(("name", "depth", "num_rows"), samples())
def test_texts_are_distributed_as_without_drafting(name: str, depth: int, num_rows: int) -> None:
    """Every text of three tokens against its exact probability."""
    p, simulation = check(replace(CASES[name], depth=depth, num_rows=num_rows))
    assert p > SMALLEST
    if depth > 1 or not CASES[name].n_min:  # a draft of one token is too short there
        assert 0.05 * simulation.num_drafted < simulation.num_stood < simulation.num_drafted


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name.lower())
def test_each_mistake_is_found(fault: Fault) -> None:
    wrong, _ = check(replace(DEEP[FAULTS[fault]], fault=fault))
    assert right(FAULTS[fault]) > SMALLEST > wrong, fault.value


def test_a_p_value_is_one_where_numbers_agree_and_zero_where_the_impossible_came() -> None:
    expected = np.full((2, 2), 0.25)
    texts = np.array([[0, 0], [0, 1], [1, 0], [1, 1]] * 100)
    assert p_value(texts, expected) > 0.99
    assert p_value(texts, np.array([[0.5, 0.0], [0.25, 0.25]])) == 0.0

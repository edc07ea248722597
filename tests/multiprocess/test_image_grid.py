"""Steps on rows with images made by hand, of 12 families: losses and all gradients of a plain loop, row by row.

No processor and no torchvision is needed. tests/multiprocess/test_image_runs.py trains with transformers' processors.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.image_steps import Case, Difference, Mix, differences
from support.images_by_hand import BY_HAND
from support.ranks import run_on_ranks

DRAWN = ("llava", "qwen3_vl", "gemma3", "mistral3", "idefics3")
FAST = ("qwen3_vl", "gemma3")
OTHERS = tuple(kind for kind in BY_HAND if kind not in FAST)
LANGUAGE, BUT_TOWERS = ("language",), ("language", "projector")
NOT_PACKED = ("qwen3_5",)
"""Its linear attention runs over the ends of documents."""

NOISY = {"gemma4": 3e-6, "qwen3_5": 1e-5}
"""transformers' own loop in float32 is as far from itself in float64."""

# By rank, micro-batch, sample and row: images here and there; on one rank alone; on none; in every row.
HERE_AND_THERE = ((((1, 0), (2,)), ((0,), (0, 0))), (((0,), (0,)), ((0, 1, 0), (3,))))
ON_ONE = ((((0, 0),), ((0,), (0,))), (((1, 2),), ((0, 2), (1,))))
ON_NONE = ((((0, 0), (0,)), ((0,), (0,))), (((0,), (0, 0)), ((0,), (0,))))
IN_ALL = ((((1, 1),), ((2,),)), (((1,), (3,)), ((1, 2),)))
MIXES = (HERE_AND_THERE, ON_ONE, ON_NONE, IN_ALL)
APART: tuple[Mix, ...] = (
    ((((1,), (0,)), ((0,),)), (((0,), (2,)), ((0,), (0,)))),
    ((((0,),), ((0,),)), (((0,), (0,)), ((0,),))),
    ((((1,), (3,)), ((2,),)), (((1,),), ((1,), (1,)))),
)
"""A row a sample."""


def cases_of(kind: str) -> list[tuple[Case, Sequence[Mix]]]:
    packed = kind not in NOT_PACKED
    mixes: Sequence[Mix] = MIXES if packed else APART
    few = mixes[:1]
    return [
        (Case(kind, packed), mixes),
        (Case(kind, packed=False, strategy="zero2"), APART),
        (Case(kind, packed, strategy="ddp"), mixes),
        (Case(kind, packed, strategy="zero1", parts=BUT_TOWERS), few),
        (Case(kind, packed, parts=LANGUAGE, checkpointed=True), few),
        (Case(kind, packed, checkpointed=True, by_block=True), mixes),
        (Case(kind, packed, parts=BUT_TOWERS, checkpointed=True, by_block=True), few),
        (Case(kind, packed, strategy="zero2", offload=True), few),
    ]


def require_equal(case: Case, found: Sequence[Difference]) -> None:
    for difference in found:
        assert difference.one_side == (), f"{case}: {difference}"
        assert difference.loss < 1e-6, f"{case}: {difference}"
        assert difference.gradient < NOISY.get(case.kind, 1e-6), f"{case}: {difference}"


@pytest.mark.parametrize("kind", [*FAST, *(pytest.param(kind, marks=pytest.mark.grid) for kind in OTHERS)])
def test_every_gradient_is_the_plain_loops(kind: str) -> None:
    work = cases_of(kind)
    if kind == "gemma4":  # of the larger ones, in which the tokens of an image see each other
        work.append((Case(kind, text={"use_bidirectional_attention": "vision"}), MIXES))
    for (case, _), found in zip(work, run_on_ranks(differences, 2, work)[0], strict=True):
        require_equal(case, found)


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {},
    "llava": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Type -> fields of its language model."""

ONE_MICRO_BATCH: tuple[Mix, ...] = (
    ((((1, 0), (2,)),), (((0,), (0, 0)),)),
    ((((0,), (0, 0)),), (((0, 0), (0,)),)),
    ((((0,), (0,)),), (((1, 2), (0, 3)),)),
)
"""So that the balance loss is over the whole step; it is by block, too."""


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_takes_the_same_steps(kind: str) -> None:
    """With its balance loss, over the tokens of images and without the small image of micro-batches of text."""
    whole = Case(kind, text=MIXTURES[kind], coef=0.3)
    spread = replace(whole, experts=2)
    by_block = replace(spread, checkpointed=True, by_block=True)
    work = [
        (whole, ONE_MICRO_BATCH),
        (spread, ONE_MICRO_BATCH),
        (replace(spread, packed=False, strategy="zero2"), [((((1,), (0,)),), (((0,), (2,)),))]),
        (by_block, MIXES),
        (replace(by_block, parts=BUT_TOWERS), MIXES[:2]),
    ]
    for (case, _), found in zip(work, run_on_ranks(differences, 2, work)[0], strict=True):
        require_equal(case, found)


@pytest.mark.parametrize(
    "kind", ["llava", *(pytest.param(kind, marks=pytest.mark.grid) for kind in BY_HAND if kind != "llava")]
)
def test_one_rank_takes_the_same_steps(kind: str) -> None:
    packed = kind not in NOT_PACKED
    own = [[mix[0] + mix[1]] for mix in (MIXES if packed else APART)]
    for (case, _), found in zip(
        work := [(Case(kind, packed), own), (Case(kind, packed=False, strategy="ddp"), [[m[0] + m[1]] for m in APART])],
        run_on_ranks(differences, 1, work)[0],
        strict=True,
    ):
        require_equal(case, found)


def drawn_mix(draw: random.Random, packed: bool, micro_batches: int) -> Mix:
    """A mix for two ranks; most rows have no image."""

    def sample() -> tuple[int, ...]:
        return tuple(draw.choice((0, 0, 0, 1, 2)) for _ in range(draw.randint(1, 3) if packed else 1))

    return tuple(
        tuple(tuple(sample() for _ in range(draw.randint(1, 2))) for _ in range(micro_batches)) for _ in range(2)
    )


def drawn_cases(seed: int, mixes: int) -> list[tuple[Case, list[Mix]]]:
    """A case for each family, with so many mixes."""
    draw, found = random.Random(seed), []
    for kind in DRAWN:
        packed, strategy = draw.random() < 0.7, draw.choice(("ddp", "zero1", "zero2", "zero3", "zero3"))
        checkpointed = draw.random() < 0.5
        by_block = strategy == "zero3" and checkpointed
        parts = draw.choice((LANGUAGE, BUT_TOWERS, (*BUT_TOWERS, "vision")))
        micro_batches = draw.randint(2, 3) if by_block else draw.randint(1, 3)
        case = Case(kind, packed, strategy, parts, checkpointed, by_block)
        found.append((case, [drawn_mix(draw, packed, micro_batches) for _ in range(mixes)]))
    return found


@pytest.mark.parametrize(
    ("seeds", "mixes"), [((0,), 4), pytest.param(range(1, 21), 10, marks=pytest.mark.grid)], ids=["20", "1000"]
)
def test_random_mixes_of_rows(seeds: Sequence[int], mixes: int) -> None:
    for seed in seeds:
        work = drawn_cases(seed, mixes)
        for (case, _), found in zip(work, run_on_ranks(differences, 2, work)[0], strict=True):
            require_equal(case, found)

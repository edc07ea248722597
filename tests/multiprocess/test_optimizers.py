"""Muon, and AdamW with moments of few bits, on sharded models: the plain loop's weights, and going on."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import tiny
from support.backend import accelerated
from support.cuts import cut_in_step
from support.ranks import run_on_ranks
from support.runs import finetuned
from support.tiny import recipe_values, save_llama
from torch.distributed.tensor import DTensor, distribute_tensor

from toolkit.optim.build import build_optimizer
from toolkit.recipe.schema import OptimizerSection

STEPS = 6
ROWS = 8
# Three blocks: with 7 matrices each, the last round of dealing is not full on 2 ranks.
llama = functools.partial(tiny.llama, num_hidden_layers=3, hidden_size=48, intermediate_size=99)
LEARNING_RATE, DECAY, BETAS, EPS, MOMENTUM = 5e-4, 0.1, (0.8, 0.9), 1e-6, 0.9
QUANTISED = ("adamw_8bit", "adamw_4bit", "adamw_fp8")


def loss_of(model: Any, step: int, mine: slice) -> torch.Tensor:
    rows = torch.randint(0, 131, (ROWS, 16), generator=torch.Generator().manual_seed(step))[mine]
    logits = model(input_ids=rows, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())


def given_gradients(step: int, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) * 0.1 for name, p in named.items()}


def plain_run(given: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """torch.optim.Muon on the blocks' matrices, torch.optim.AdamW on the rest, one process: losses and weights.

    Args:
        given: the gradients, whatever the weights, so that rounding does not add up over the steps.
    """
    torch.set_num_threads(1)
    model = llama()
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if ".layers." in name and p.ndim == 2]
    assert len(matrices) == 21
    others = [p for name, p in named.items() if ".layers." not in name and p.ndim == 2]
    vectors = [p for p in named.values() if p.ndim == 1]
    muon = torch.optim.Muon(
        matrices, lr=LEARNING_RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": others, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, foreach=False)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, slice(None))
        loss.backward()
        losses.append(loss.item())
        for name, gradient in given_gradients(step, named).items():
            named[name].grad = gradient if given else named[name].grad
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in named.items()}


def sharded_runs() -> dict[Any, Any]:
    section = OptimizerSection(
        kind="muon", learning_rate=LEARNING_RATE, weight_decay=DECAY, beta1=0.8, beta2=0.9, eps=EPS, momentum=MOMENTUM
    )
    found: dict[Any, Any] = {}
    ways = [("zero3", True), ("zero3", False), ("zero1", False), ("ddp", False)]
    for strategy, given in ways[: 4 if os.environ["WORLD_SIZE"] == "2" else 2]:  # one rank shards nothing
        accelerator, model = accelerated(strategy), llama()
        optimizer = build_optimizer(model, section)
        model, optimizer = accelerator.prepare(model, optimizer)
        named = dict(accelerator.unwrap_model(model).named_parameters())
        rows = ROWS // accelerator.num_processes
        mine = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, step, mine)
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            for name, gradient in given_gradients(step, named).items():
                p = named[name]
                if given:
                    assert isinstance(p, DTensor)
                    p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)
            optimizer.step()
            optimizer.zero_grad()
        whole = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named.items()}
        found[strategy, given] = losses, whole
    return found


@pytest.fixture(scope="module")
def plain() -> dict[bool, Any]:
    return {given: plain_run(given) for given in (True, False)}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.grid)])
def test_muon_of_sharded_matrices_is_that_of_whole_ones(num_ranks: int, plain: dict[bool, Any]) -> None:
    """Newton-Schulz, in bf16, makes directions of next to no gradient 500 times as long, and their rounding too."""
    start = dict(llama().named_parameters())
    for (strategy, given), (losses, weights) in run_on_ranks(sharded_runs, num_ranks)[0].items():
        expected_losses, expected = plain[given]
        if not given:
            assert losses == pytest.approx(expected_losses, rel=1e-5), strategy
        for name, weight in expected.items():
            assert float((weight - start[name].detach()).abs().max()) > 5e-4, "it must have moved"
            differences = (weights[name] - weight).abs()
            difference = float(differences.max() if given else differences.mean())
            assert difference < (1e-6 if given else 1e-5), (strategy, name, difference)


def resumed_runs(folder: Path, data: Path) -> dict[str, Any]:
    """Whole runs, and runs cut after step 5 that go on from the checkpoint of step 4."""
    torch.compiler.set_stance("force_eager")  # torchao compiles its step, for half a minute
    found: dict[str, Any] = {}
    for kind in ("adamw", "muon", *QUANTISED):
        for name in ("whole", "cut"):
            values = recipe_values(folder / "model", data, folder / f"{kind}-{name}", folder / "cache", max_steps=7)
            values["optimizer"] |= {"kind": kind}
            values["checkpoint"] = {"every_steps": 4} if name == "cut" else {}
            values["export"] = {"enabled": False}
            if name == "cut":
                with cut_in_step(6):
                    finetuned(values)
            found[kind, name] = [record["loss"] for record in finetuned(values).metrics]
    return found


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("optimizers")
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    save_llama(folder / "model", texts, tied=True)
    return run_on_ranks(resumed_runs, 2, folder, text_file)[0]


def test_muon_goes_on_bit_for_bit(losses: dict[Any, list[float]]) -> None:
    assert losses["muon", "cut"] == losses["muon", "whole"]
    assert losses["muon", "whole"] != losses["adamw", "whole"]


@pytest.mark.parametrize("kind", QUANTISED)
def test_few_bits_follow_adamw_and_go_on_within_their_precision(losses: dict[Any, list[float]], kind: str) -> None:
    assert losses[kind, "whole"] == pytest.approx(losses["adamw", "whole"], rel=1e-2)
    assert losses[kind, "whole"] != losses["adamw", "whole"]
    assert losses[kind, "cut"][:4] == losses[kind, "whole"][:4]
    # On as many ranks moments have the same codes; a scale may be rounded once more.
    assert losses[kind, "cut"] == pytest.approx(losses[kind, "whole"], rel=1e-5)

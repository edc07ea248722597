"""The plan of encoder-decoders against a trace of the real FSDP2: cross attention, and blocks that stand aside."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.planning.memory.probe import Prober
from toolkit.planning.memory.replay import replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.memory.trace import trace
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.planning.workload.workload import Workload, workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

BART = {
    "model_type": "bart",
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "t5": (
        {"model_type": "t5", "d_kv": 32, "d_ff": 256, "num_heads": 4, "decoder_start_token_id": 1},
        ("num_layers", "num_decoder_layers"),
    ),
    "bart": (BART, ("encoder_layers", "decoder_layers")),
}


def workload(kind: str, layers: tuple[int, int], lengths: tuple[int, int], precision: str) -> Workload:
    config, names = CONFIGS[kind]
    values = {
        "model": {
            "config": {"d_model": 128, "vocab_size": 512, **config, **dict(zip(names, layers, strict=True))},
            "train_tokenizer_vocab_size": 512,
        },
        "data": {"train": "none.jsonl", "max_length": lengths[0], "max_target_length": lengths[1]},
        "objective": {"kind": "seq2seq"},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"output_dir": "none", "max_steps": 1},
    }
    return workload_of(Recipe.from_mapping(values), precision)


@pytest.mark.parametrize(
    "every", [None, pytest.param(1, marks=pytest.mark.grid), pytest.param(2, marks=pytest.mark.grid)]
)
@pytest.mark.parametrize(
    ("kind", "layers", "lengths", "strategy", "precision"),
    [
        ("t5", (5, 6), (64, 24), "zero3", "bf16"),
        pytest.param("t5", (4, 2), (24, 96), "zero1", "no", marks=pytest.mark.grid),
        ("bart", (5, 6), (64, 24), "zero3", "bf16"),
        pytest.param("bart", (2, 5), (24, 96), "zero2", "no", marks=pytest.mark.grid),
    ],
)
def test_the_plan_is_the_trace(
    kind: str, layers: tuple[int, int], lengths: tuple[int, int], strategy: str, precision: str, every: int | None
) -> None:
    checkpointing = None if every is None else Checkpointing(every)
    mesh, work = MeshShape(1, 4), workload(kind, layers, lengths, precision)
    found = trace(workload(kind, layers, lengths, precision), STRATEGIES[strategy], mesh, 2, 1, checkpointing)
    prober = Prober(work)
    units = unit_shapes(work.model, prober.plan, precision)
    layout = MemoryLayout(mesh.shard, 2 if precision == "bf16" else None, 4, optimizer=8)
    moments = replay(units, prober.probe(2, checkpointing), STRATEGIES[strategy], layout, 1)
    planned = max(moment.total - moment.optimizer for moment in moments)
    assert planned == pytest.approx(found.peak, rel=0.02)

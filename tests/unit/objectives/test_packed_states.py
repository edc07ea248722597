"""Packed rows of models whose layers carry a state: kernels are told where documents begin, and keep them apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.packed_rows import Documents, packed
from support.tiny import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_next import modeling_qwen3_next

from toolkit.errors import BadInputError
from toolkit.model.attention.attention import kernels_take_documents
from toolkit.objectives.causal_lm import CausalLM
from toolkit.run.checks.packing_check import check_leaks

CPU = torch.device("cpu")
FILES: dict[str, Any] = {"qwen3_next": modeling_qwen3_next, "bamba": modeling_bamba}


def by_document(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A stand-in for a kernel: transformers' own function, on one document after another.

    Their arguments are named, as kernels': transformers hands on what stands in a signature.
    """

    def convolve(x: Any, weight: Any, bias: Any = None, activation: Any = None, seq_idx: Any = None) -> torch.Tensor:
        if seq_idx is None:
            return plain(x, weight, bias, activation)  # type: ignore[no-any-return]
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == (x.shape[0], x.shape[2])
        counts = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([plain(part, weight, bias, activation) for part in x.split(counts, dim=2)], dim=2)

    def delta(
        query: Any, key: Any, value: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool, cu_seqlens: Any = None
    ) -> Any:
        if cu_seqlens is None:
            cu_seqlens = torch.tensor([0, query.shape[1]])
        assert query.shape[0] == 1, "fla takes bounds in a single row alone"
        each = zip(*(t.split(cu_seqlens.diff().tolist(), dim=1) for t in (query, key, value, g, beta)), strict=True)
        how = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return torch.cat([plain(q, k, v, g=d, beta=b, **how)[0] for q, k, v, d, b in each], dim=1), None

    def scan(
        x: Any,
        dt: Any,
        a: Any,
        b: Any,
        c: Any,
        chunk_size: int,
        D: Any,  # noqa: N803
        dt_bias: Any,
        dt_softplus: bool,
        seq_idx: Any = None,
    ) -> Any:
        counts = [x.shape[1]] if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        each = zip(*(t.split(counts, dim=1) for t in (x, dt, b, c)), strict=True)
        how = {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
        return torch.cat([plain(x, dt, a, b, c, **how) for x, dt, b, c in each], dim=1)

    # The others are for a cache, and a fused one that transformers goes on without.
    if "conv1d_fn" in name:
        return convolve
    return delta if "chunk_gated_delta" in name else scan if "chunk_scan" in name else lambda *_, **__: None


def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that have a stand-in for each function of both types, as if they had been there at the import."""
    package = ModuleType("stand_in_kernels")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for file in FILES.values():
        for name, found in list(vars(file).items()):
            if "is_new_implementation" in getattr(getattr(found, "__code__", None), "co_freevars", ()):
                setattr(package, f"own_{name}", by_document(found.__wrapped__, name))
                decorate = use_kernel_func_from_hub_with_fallback(f"own_{name}", package.__name__)
                monkeypatch.setattr(file, name, decorate(found.__wrapped__))


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = tiny_config(kind)
    config.vocab_size = 91
    if kind == "qwen3_next":
        config.layer_types = ["linear_attention", "full_attention"]
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.train()


def loss_alone(model: nn.Module, rows: Documents) -> torch.Tensor:
    total = torch.zeros(())
    for ids, targets in zip(rows.rows, rows.targets, strict=True):
        tokens = torch.from_numpy(ids)[None]
        losses = F.cross_entropy(
            model(input_ids=tokens, use_cache=False).logits[0, :-1], tokens[0, 1:], reduction="none"
        )
        total = total + losses[torch.from_numpy(targets[1:])].sum()
    return total


@pytest.mark.parametrize("kind", list(FILES))
def test_without_kernels_rows_that_share_a_sample_are_refused(kind: str) -> None:
    model = built(kind)
    assert not kernels_take_documents(model)
    with pytest.raises(BadInputError, match="rows that share a sample see each other"):
        check_leaks(model, CausalLM(model), packed(Documents(8)), 2, CPU, False)


@pytest.mark.parametrize("kind", list(FILES))
def test_kernels_that_are_told_where_documents_begin_keep_them_apart(kind: str) -> None:
    model, rows = built(kind), Documents(6)
    expected = loss_alone(model, rows)  # without kernels
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        with_kernels(patch)
        assert kernels_take_documents(model)
        objective, samples = CausalLM(model), packed(rows)
        assert check_leaks(model, objective, samples, 2, CPU, False) is not None
        found = objective.loss_sum(model, objective.on_host(samples.batch(range(len(samples)))))
        found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        if name in gradients:
            scale = max(1.0, float(gradients[name].abs().max()))
            assert float((parameter.grad - gradients[name]).abs().max()) <= 1e-4 * scale, name


def test_models_without_such_layers_have_none() -> None:
    assert not kernels_take_documents(built("llama"))

"""A model as plans see it: its units, and what micro-batches and answers take when it runs without memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from toolkit.errors import BadInputError, UnplannableError, in_words
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.positions import num_positions
from toolkit.model.structure.fake_tensors import FakeTensorMode, grouped_products, without_logs
from toolkit.objectives.teacher import teacher_units
from toolkit.optim.build import block_matrices
from toolkit.planning.hardware import Hardware
from toolkit.planning.memory.fake import Ledger, give_parameters
from toolkit.planning.memory.probe import Probe, Prober
from toolkit.planning.memory.state_bytes import COMPUTE_BYTES, OPTIMIZER_BYTES
from toolkit.planning.setup import Setup
from toolkit.planning.workload.unit_shapes import ParameterShape, UnitShape, teacher_shapes, unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.apply import PRECISIONS
from toolkit.sharding.blocks.checkpointing import Checkpointing


class ProbedModel:
    """Probes the model of one workload; what setups share is probed once."""

    def __init__(self, recipe: Recipe, workload: Workload, hardware: Hardware) -> None:
        self.recipe, self.workload, self.hardware = recipe, workload, hardware
        self._probes: dict[tuple[bool, int, Checkpointing | None], Probe] = {}
        self._writings: dict[tuple[bool, int, int, int], Answering] = {}

    @cached_property
    def sharded_prober(self) -> Prober:
        return Prober(self.workload)

    @cached_property
    def _whole_prober(self) -> Prober:
        return Prober(self.workload, whole=True)

    @cached_property
    def units(self) -> list[UnitShape]:
        plan, is_cut = self.sharded_prober.plan, self.workload.tensor > 1
        model = self.workload.model_copy() if is_cut else self.workload.model
        stepped_by_muon = block_matrices(model, plan) if self.recipe.optimizer.kind == "muon" else []
        return unit_shapes(model, plan, self.workload.mixed_precision, stepped_by_muon, self.workload.experts)

    @cached_property
    def teacher_units(self) -> list[UnitShape]:
        """Units of the teacher, if there is one."""
        teacher = self.workload.teacher
        if teacher is None:
            return []
        plan = teacher_units(teacher, self.workload.unit_classes)
        return teacher_shapes(teacher, plan, self.workload.mixed_precision, self.workload.tensor)

    @cached_property
    def whole_bytes(self) -> list[int]:
        """Bytes of each unit when it is gathered."""
        compute = COMPUTE_BYTES[self.workload.mixed_precision]
        return [sum(int(p.numel * (compute or p.held)) for p in unit.parameters) for unit in self.units]

    def probe(self, setup: Setup) -> Probe:
        """Probes one micro-batch of a setup.

        Raises:
            BadInputError: if the recipe cannot run so.
            UnplannableError: if the model cannot run on tensors without values.
        """
        key = self._probe_key(setup)
        if key not in self._probes:
            prober = self._whole_prober if key[0] else self.sharded_prober
            with self._without_values():
                self._probes[key] = prober.probe(setup.micro_batch_size, setup.checkpointing)
        return self._probes[key]

    def writing(self, whole: bool, rows: int, prompt: int, answer: int) -> Answering:
        """Probes completions after prompts of this length, by a whole model, as under DDP, or a sharded one."""
        key = whole, rows, prompt, answer
        if key not in self._writings:
            positions = num_positions(self.workload.model)
            if positions is not None:  # an encoder-decoder's target may use all positions
                before = 0 if self.recipe.objective.spec.encoder_decoder else prompt
                answer = max(2, min(answer, positions - before))
            with self._without_values():
                self._writings[key] = answering(self.workload, rows, prompt, answer, whole)
        return self._writings[key]

    @contextmanager
    def _without_values(self) -> Iterator[None]:
        """Lets models run inside; raises UnplannableError if they need the values of tensors."""
        try:
            with without_logs(), grouped_products():
                yield
        except BadInputError:
            raise
        except Exception as error:  # a model may do anything
            raise UnplannableError(
                f"{type(self.workload.model).__name__} cannot run on tensors without values, so it cannot be "
                f"planned: {in_words(error)}"
            ) from error

    def _probe_key(self, setup: Setup) -> tuple[bool, int, Checkpointing | None]:
        """Returns what a probe depends on: whether the model is whole, as under DDP, micro-batch and checkpoints."""
        # If its state alone does not fit, DDP's activations, which are a little larger, need no probe of their own.
        whole = not setup.strategy.sharded and self._whole_state_bytes <= self.hardware.memory_bytes
        return whole, setup.micro_batch_size, setup.checkpointing

    @cached_property
    def _whole_state_bytes(self) -> int:
        """Bytes of the whole model's parameters, gradients and optimizer state."""
        parameters = [p for unit in (*self.teacher_units, *self.units) for p in unit.parameters]
        return sum(int(p.numel * (p.held + (4 + self._kept_bytes(p)) * p.trainable)) for p in parameters)

    def _kept_bytes(self, parameter: ParameterShape) -> float:
        """Returns the bytes kept for each trained element: the optimizer's state and the weights' average."""
        state = OPTIMIZER_BYTES[self.recipe.optimizer.kind] * parameter.moments / 2
        return state + 4 * (self.recipe.training.ema is not None)


# ---- Probes what answers take that a model writes during training: keys and values, and a forward with them ----


@dataclass(frozen=True)
class Answering:
    """What a rank holds in addition to its weights while it writes a batch of answers (bytes).

    Attributes:
        cache: keys and values, or the states of recurrent layers, at the end of the answers; in an encoder-decoder
            also the encoder's states.
        peak: the most at once, including the cache.
    """

    cache: int
    peak: int


def answering(workload: Workload, rows: int, prompt: int, answer: int, whole: bool) -> Answering:
    """Runs the model without memory: a forward that fills its cache, and one of a further token.

    The forward that fills the cache has whole answers, which takes a little more than prompts alone.

    Args:
        rows: answers of a batch.
        prompt, answer: tokens of the longest prompt and answer.
        whole: whether to run it as torch's DDP does: mixed precision casts parameters at their uses.
    """
    dtype = PRECISIONS[workload.mixed_precision]
    casts = whole and dtype is not None
    # With the model's own attention, because prompts of a batch are padded and masked.
    model, ledger = replace(workload, attention=None).model_copy().eval(), Ledger()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        give_parameters(model, None if casts else dtype)
        for tensor in (*model.parameters(), *model.buffers()):
            ledger.see(tensor)
        before = ledger.current
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=casts))
        stack.enter_context(ledger)
        ledger.restart()
        kept = _fill_cache(base_of(model), rows, prompt, answer)  # alive while it is counted
        torch.clear_autocast_cache()
        found = Answering(ledger.current - before, ledger.peak - before)
        del kept
        return found


def _fill_cache(model: Any, rows: int, prompt: int, answer: int) -> dict[str, Any]:
    """Returns the cache of whole answers, with the encoder's states of an encoder-decoder; empty without a cache."""
    if model.config.is_encoder_decoder:
        mask = _empty_ids(rows, prompt)
        states = model.get_encoder()(input_ids=_empty_ids(rows, prompt), attention_mask=mask)
        read = {"encoder_outputs": states, "attention_mask": mask}
        cache = _cache_after(model, read | {"decoder_input_ids": _empty_ids(rows, answer - 1)})
        cache = _cache_after(model, read | {"decoder_input_ids": _empty_ids(rows, 1)} | cache)
        return {"states": states} | cache
    tokens = prompt + answer
    cache = _cache_after(
        model, {"input_ids": _empty_ids(rows, tokens - 1), "attention_mask": _empty_ids(rows, tokens - 1)}
    )
    if not cache:  # the model computes all tokens again
        return {}
    return _cache_after(model, {"input_ids": _empty_ids(rows, 1), "attention_mask": _empty_ids(rows, tokens)} | cache)


def _empty_ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.empty(rows, tokens, dtype=torch.long)


def _cache_after(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the cache after a forward, by its name among arguments; empty if the model has none."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    cache = model(**inputs, **last, use_cache=True).get("cache")
    return {} if cache is None else {"cache": cache}

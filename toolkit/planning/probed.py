"""A model as plans see it: its units, and what micro-batches and answers take when it runs without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from toolkit.errors import BadInputError, UnplannableError, in_words
from toolkit.model.attention.positions import num_positions
from toolkit.model.structure.fake_tensors import grouped_products, without_logs
from toolkit.objectives.teacher import teacher_units
from toolkit.optim.build import block_matrices
from toolkit.planning.hardware import Hardware
from toolkit.planning.memory.answering import Answering, answering
from toolkit.planning.memory.probe import Probe, Prober
from toolkit.planning.memory.state_bytes import COMPUTE_BYTES, OPTIMIZER_BYTES
from toolkit.planning.setup import Setup
from toolkit.planning.workload.unit_shapes import ParameterShape, UnitShape, teacher_shapes, unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.recipe.recipe import Recipe
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

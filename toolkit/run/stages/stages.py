"""The results of a run's stages. Each stage takes what earlier ones return, so their order is in the types.

stage            of file             takes                         returns
open_run         opening.py          the recipe                    OpenedRun
read_rows        model_on_meta.py    OpenedRun                     TokenisedRows
build_on_meta    model_on_meta.py    TokenisedRows                 MetaModel
plan_memory      sharded_model.py    MetaModel                     Planned (planning/check.py)
shard_model      sharded_model.py    MetaModel, Planned            ShardedModel
check_model      model_checks.py     MetaModel to ShardedModel     CheckedModel
prepare_run      ../prepare.py       OpenedRun, its parts          PreparedRun: all of the above, and the batches
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from toolkit.data.build import TokenisedData
from toolkit.data.report import DataReport
from toolkit.data.samples.loader import Loader
from toolkit.model.load import LoadedModel
from toolkit.model.weights.weights import Fit
from toolkit.objectives.losses.balance import Balance
from toolkit.objectives.objective import Objective
from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.pages.parts.story import Story
from toolkit.pages.samples_page import SampledPrompt
from toolkit.planning.check import Planned
from toolkit.recipe.recipe import Recipe
from toolkit.run.checks.by_block_check import Accumulation
from toolkit.sharding.blocks.compiling import Compilation
from toolkit.sharding.plugin import ShardingPlugin
from toolkit.terminal import Terminal


@dataclass(frozen=True)
class OpenedRun:
    """A run whose ranks have met; nothing is read or written yet.

    Attributes:
        console: prints on rank 0 only.
        story: the record of the run, which goes on where its checkpoint does.
    """

    recipe: Recipe
    accelerator: Accelerator
    plugin: ShardingPlugin
    output_dir: Path
    console: Terminal
    story: Story = field(default_factory=Story)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def in_16_bits(self) -> bool:
        """Whether the model computes in 16 bits, so that checks allow for its rounding."""
        return self.accelerator.mixed_precision != "no" or self.recipe.model.dtype != "float32"


@dataclass(frozen=True)
class TokenisedRows:
    """The rows of the recipe as its tokenizer reads them, before they are adapted to the model."""

    tokenizer: PreTrainedTokenizerBase
    data: TokenisedData


@dataclass(frozen=True)
class MetaModel:
    """The model on the meta device, without weights, and what follows from its architecture.

    Attributes:
        data: the rows in the form that this model takes.
        padded: why rows are padded although `data.packing` is not set, or None if they are not.
        attention: the implementation that was chosen, and why.
        teacher: the model to learn from, on the meta device, or None for objectives without one.
        balance: counts the loads of a mixture of experts, and adds the routers' losses.
    """

    loaded: LoadedModel
    tokenizer: PreTrainedTokenizerBase
    data: TokenisedData
    padded: str | None
    attention: str
    teacher: LoadedModel | None
    objective: Objective
    balance: Balance

    @property
    def model(self) -> Any:
        """transformers' or peft's model."""
        return self.loaded.model


@dataclass(frozen=True)
class ShardedModel:
    """The model with its weights, under its strategy.

    Attributes:
        model: as `Accelerator.prepare` returned it.
        inner: the model inside DDP, if DDP wraps it.
        optimizer: as `Accelerator.prepare` returned it.
        compilation: how the blocks are compiled, or None if they run eagerly.
    """

    model: nn.Module
    inner: nn.Module
    optimizer: torch.optim.Optimizer
    compilation: Compilation | None


@dataclass(frozen=True)
class PackingCheck:
    """Measurements of rows that share a sample.

    Attributes:
        fill_rate: share of the samples' tokens that rows fill.
        differences: differences of a document's logits, as shares of the largest, if the others are replaced and if it
            is alone; None if no sample holds two rows.
    """

    fill_rate: float
    differences: tuple[float, float] | None


@dataclass(frozen=True)
class CheckedModel:
    """Objective and rows with which the sharded model has passed every check.

    Attributes:
        data: the rows, unpacked if those that share a sample saw each other and the recipe allows padding.
        padded: why rows are padded although `data.packing` is not set, or None if they are not.
        packing: measurements of rows that share a sample, or None if none do.
        alone: why rows run one after another without padding, or None if they are padded or packed.
        head_loss: what computes the losses, and why; None for objectives without a choice.
        parts_differ: the largest difference of logits or gradients from those of whole rows, or of whole matrices;
            None if rows and matrices are whole.
    """

    objective: Objective
    data: TokenisedData
    padded: str | None
    packing: PackingCheck | None
    alone: str | None
    head_loss: str | None
    parts_differ: float | None


@dataclass
class ReportExtras:
    """What the report shows of a run in addition to its records. Training adds to it.

    Attributes:
        data_report: report of the rows; for a stream, of those that were read so far.
        side_by_side: what the model writes after held-out prompts, if the recipe asks for that.
        sampled: the last step whose own samples were learned, and some of them; None if there are none.
        exported_step: the step whose weights the run leaves, if they are not the last ones.
    """

    data_report: DataReport
    side_by_side: list[SideBySide]
    sampled: tuple[int, list[SampledPrompt]] | None = None
    exported_step: int | None = None


@dataclass(frozen=True)
class PreparedRun:
    """All that training needs.

    Attributes:
        windows: yields this rank's micro-batches of one optimizer step at a time.
        num_steps: optimizer steps of the run, including those before a checkpoint.
        num_positions: samples of the run.
        accumulation: how the micro-batches of a step run.
        ends: which tokens end what is learned, or None if the model writes no text.
    """

    on_meta: MetaModel
    planned: Planned
    sharded: ShardedModel
    checked: CheckedModel
    windows: Loader
    num_steps: int
    num_positions: int
    accumulation: Accumulation
    shown: ReportExtras
    ends: str | None

    @property
    def model(self) -> nn.Module:
        """The model as `Accelerator.prepare` returned it."""
        return self.sharded.model

    @property
    def inner(self) -> Any:
        """The model inside DDP, if DDP wraps it."""
        return self.sharded.inner

    @property
    def fit(self) -> Fit:
        """How the model's files fit it."""
        return self.on_meta.loaded.fit

    @property
    def objective(self) -> Objective:
        return self.checked.objective

    @property
    def data(self) -> TokenisedData:
        return self.checked.data

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.on_meta.tokenizer

    @property
    def balance(self) -> Balance:
        return self.on_meta.balance

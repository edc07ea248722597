"""The results of a run's stages. Each stage takes what earlier ones return, so their order is in the types.

stage            of file             takes                         returns
open_run         accelerator.py      the recipe                    OpenedRun
build_on_meta    ../prepare.py       OpenedRun, tokenizer, rows    MetaModel
plan_memory      sharded_model.py    MetaModel                     Planned (planning/check.py)
shard_model      sharded_model.py    MetaModel, Planned            ShardedModel, which the parts of the run check
prepare_run      ../prepare.py       OpenedRun, its parts          PreparedRun: all of the above, and the batches
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.resume import Resumption
from toolkit.data.build import TokenisedData
from toolkit.data.samples.loader import Loader
from toolkit.data.samples.sequence_parts import Part
from toolkit.model.load import LoadedModel
from toolkit.model.weights.weights import Fit
from toolkit.objectives.losses.balance import Balance
from toolkit.objectives.objective import Objective
from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.pages.parts.story import Story
from toolkit.pages.samples_page import SampledPrompt
from toolkit.planning.check import Planned
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.blocks.compiling import Compilation
from toolkit.sharding.plugin import ShardingPlugin
from toolkit.terminal import Terminal


@dataclass(frozen=True)
class Read:
    """Something that a run reads, which a run that resumes has to find again.

    Attributes:
        name: its field, or its name in `Manifest`.
        digest: None if the run reads none.
        changed: what is said of another digest; `{step}`, `{before}` and `{now}` are filled in.
        unknown: what is said where the checkpoint does not have it, "" for nothing; None: it read none.
        refuses: whether a run is refused that finds another one.
    """

    name: str
    digest: str | None
    changed: str
    unknown: str | None = None
    refuses: bool = True


@dataclass
class ReportExtras:
    """What the report shows of a run in addition to its records. Training adds to it.

    Attributes:
        side_by_side: what the model writes after held-out prompts, if the recipe asks for that.
        sampled: the last step whose own samples were learned, and some of them; None if there are none.
        exported_step: the step whose weights the run leaves, if they are not the last ones.
    """

    side_by_side: list[SideBySide] = field(default_factory=list)
    sampled: tuple[int, list[SampledPrompt]] | None = None
    exported_step: int | None = None


@dataclass
class OpenedRun:
    """A run whose ranks have met; nothing is read or written yet.

    Attributes:
        recipe: the run's recipe; once its rows are read it has the day that the chat template writes.
        console: prints on rank 0 only.
        found: the checkpoint from which the run goes on, if there is one.
        story: the record of the run, which goes on where its checkpoint does.
        reads: what the run reads.
        facts: lines of the summary, the report and the card: name -> sentence; there is no line of an empty one.
    """

    recipe: Recipe
    accelerator: Accelerator
    plugin: ShardingPlugin
    output_dir: Path
    console: Terminal
    found: Resumption = field(default_factory=Resumption)
    story: Story = field(default_factory=Story)
    reads: list[Read] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    shown: ReportExtras = field(default_factory=ReportExtras)

    @property
    def resumed(self) -> Manifest | None:
        """The manifest of the checkpoint from which the run goes on."""
        return None if self.found.start is None else self.found.start[1]

    @property
    def digests(self) -> dict[str, str | None]:
        """A digest of all that the run reads, by its name. Checkpoints and exports have them."""
        return {read.name: read.digest for read in self.reads}

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def in_16_bits(self) -> bool:
        """Whether the model computes in 16 bits, so that checks allow for its rounding."""
        return self.accelerator.mixed_precision != "no" or self.recipe.model.dtype != "float32"

    @property
    def share(self) -> tuple[int, int, Part]:
        """The number of this rank's group, how many groups there are, and this rank's part of the group's rows.

        The ranks of a group share each row (`sharding.sequence`), or have the same rows (`sharding.tensor`).
        """
        section, rank = self.recipe.sharding, self.accelerator.process_index
        size = section.sequence * section.tensor
        return rank // size, self.accelerator.num_processes // size, Part(rank % section.sequence, section.sequence)

    @property
    def samples_per_step(self) -> int:
        training = self.recipe.training
        return training.micro_batch_size * training.gradient_accumulation_steps * self.share[1]


@dataclass(frozen=True)
class MetaModel:
    """The model on the meta device, without weights, and what follows from its architecture.

    Attributes:
        data: the rows in the form that this model takes.
        padded: why rows are padded although `data.packing` is not set, or None if they are not.
        attention: the implementation that was chosen, and why.
        teacher: the model to learn from, on the meta device, or None for objectives without one.
        build_objective: makes the objective anew, for rows that are packed or not.
        balance: counts the loads of a mixture of experts, and adds the routers' losses.
    """

    loaded: LoadedModel
    tokenizer: PreTrainedTokenizerBase
    data: TokenisedData
    padded: str | None
    attention: str
    teacher: LoadedModel | None
    build_objective: Callable[..., Objective]
    objective: Objective
    balance: Balance

    @property
    def model(self) -> Any:
        """transformers' or peft's model."""
        return self.loaded.model


@dataclass
class ShardedModel:
    """The model with its weights, under its strategy, and what it trains with. Checks may change the latter.

    Attributes:
        model: as `Accelerator.prepare` returned it.
        inner: the model inside DDP, if DDP wraps it.
        optimizer: as `Accelerator.prepare` returned it.
        compilation: how the blocks are compiled, or None if they run eagerly.
        data: the rows, unpacked if those that share a sample saw each other and the recipe allows padding.
        padded: why rows are padded although `data.packing` is not set, or None if they are not.
        by_block: runs the micro-batches of a step by block, or None if they run one after another.
    """

    model: nn.Module
    inner: Any
    optimizer: torch.optim.Optimizer
    compilation: Compilation | None
    objective: Objective
    data: TokenisedData
    padded: str | None = None
    by_block: ByBlock | None = None

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside Accelerate's."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


@dataclass(frozen=True)
class BuiltRun:
    """A run whose model is sharded and has its weights."""

    opened: OpenedRun
    on_meta: MetaModel
    planned: Planned
    sharded: ShardedModel

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
        return self.sharded.objective

    @property
    def data(self) -> TokenisedData:
        return self.sharded.data

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.on_meta.tokenizer

    @property
    def balance(self) -> Balance:
        return self.on_meta.balance


@dataclass(frozen=True)
class PreparedRun(BuiltRun):
    """All that training needs.

    Attributes:
        windows: yields this rank's micro-batches of one optimizer step at a time.
        num_steps: optimizer steps of the run, including those before a checkpoint.
    """

    windows: Loader
    num_steps: int

"""Rows that are not trained on (`kept.file`): their loss, and how far the model has moved on them since the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import send_to_device

from toolkit import ranks
from toolkit.data import build
from toolkit.data.build import TokenisedData
from toolkit.data.rows.cache import digest
from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError, DataError
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.causal_lm import CausalLM, rows_of
from toolkit.objectives.losses.divergence import ENTRIES
from toolkit.objectives.losses.fused_linear_cross_entropy import AfterHead, how_of
from toolkit.recipe.figures import KEPT_KL, KEPT_LOSS
from toolkit.recipe.schema import SourceSection
from toolkit.run.stages.part import NEW_FOLDER, Loop, RunPart
from toolkit.run.stages.rows import batches_of
from toolkit.run.stages.stages import MetaModel, PreparedRun, Read
from toolkit.terminal import LongAction, format_bytes
from toolkit.training.extension import Extension
from toolkit.training.loop_state import LoopState
from toolkit.training.phase import Phase

FILE = "kept.file"

MOST_TOKENS = 128
"""Of each target, the probabilities of its likeliest tokens before the first step are held, and that of all others."""

BYTES = MOST_TOKENS * 8 + 4
"""Of a target: the tokens' numbers, int32, and log-probabilities in float32."""

SMALLEST = -100.0
"""Log-probabilities below this count as this, which is 0 in float32, so that no difference is infinite."""


class Kept(RunPart):
    def on_meta(self, on_meta: MetaModel) -> None:
        if self.recipe.kept.file is None:
            return
        self._kept = self._rows(on_meta, on_meta.data.report.packing)
        if self._kept.train.has_images:
            raise BadInputError(f"{FILE}: has rows with images, which are not measured; leave them out")
        changed = (
            f"checkpoint.resume: the rows of {FILE}, or how they are read, are others than those of the run up to step "
            f"{{step}}, if it had any, so that its figures would not compare; undo that, {NEW_FOLDER}"
        )
        self.reads.append(Read("kept", digest(self._kept.fingerprint), changed))

    def prepared(self, run: PreparedRun) -> None:
        if self.recipe.kept.file is None:
            return
        changed = (
            "checkpoint.resume: the run up to step {step} began with other weights than model.name_or_path has now, "
            f"and what it says of {FILE} is compared with those; bring them back, {NEW_FOLDER}"
        )
        self.reads.append(Read("kept: weights", run.fit.origin, changed))
        if run.data.report.packing != self._kept.report.packing:  # rows that see each other are padded
            self._kept = self._rows(run.on_meta, run.data.report.packing)
        report = self._kept.report.train
        assert report is not None, "it has rows"
        targets = report.target_tokens or 0
        self.facts["kept"] = (
            f"{report.kept} of {report.read} rows, {targets:,} targets, whose probabilities before the first step take "
            f"up to {format_bytes(targets * BYTES)} on the hosts of all ranks"
        )

    def extension(self, loop: Loop) -> Extension | None:
        return None if self.recipe.kept.file is None else KeptRows(loop, self._kept)

    def _rows(self, on_meta: MetaModel, packing: bool) -> TokenisedData:
        """Returns the kept rows in the place of those to train on, packed as these are.

        Raises:
            DataError: if they cannot be read.
        """
        assert self.recipe.kept.file is not None
        only = {"train": [SourceSection(path=self.recipe.kept.file)], "packing": packing, "streaming": False}
        nothing = dict.fromkeys(("validation", "validation_fraction", "image_root", "min_pixels", "max_pixels"))
        try:
            section = self.recipe.data.model_copy(update=only | nothing)
            return build.build(section, on_meta.tokenizer, self.recipe.training.seed)
        except DataError as error:
            raise DataError(str(error).replace("data.train", FILE)) from error


class KeptRows(Extension):
    """Measures the rows, which have the model's own predictions before the first step next to them.

    Args:
        loop: its model has the weights that the run starts from, also where it resumes.
    """

    @torch.no_grad()
    def __init__(self, loop: Loop, rows: TokenisedData) -> None:
        run, opened = loop.run, loop.run.opened
        self._loop, self._model, self._device = loop, run.model, opened.device
        self._batches = batches_of(run, rows.train)
        self._causal = CausalLM(run.on_meta.model, rows.report.packing)
        self._causal.check_head_loss(run.model, opened.device, opened.in_16_bits)
        self._start: list[tuple[torch.Tensor, torch.Tensor]] = []
        with without_dropout(run.model), LongAction(opened.console, "measuring kept rows before the first step"):
            for batch in self._batches():
                self._run(batch, self._remember)

    def at_evaluation(self, trainer: LoopState) -> dict[str, Any]:
        start, sums = iter(self._start), torch.zeros(3, dtype=torch.float64, device=self._device)

        def compare(found: torch.Tensor, targets: torch.Tensor) -> None:
            before, ids = (tensor.to(self._device) for tensor in next(start))
            divergence = (before.exp() * (before - among(found, ids))).sum()
            loss = -found.gather(1, targets[:, None]).sum()
            sums.add_(torch.stack([loss, loss.new_tensor(len(targets)), divergence]))

        for batch in self._batches():
            trainer.enter_phase(Phase.EVALUATE)
            trainer.check_stop()
            self._run(batch, compare)
        loss, targets, divergence = trainer.accelerator.reduce(sums, "sum").tolist()
        targets = max(1.0, targets)
        return {KEPT_LOSS.field: loss / targets, KEPT_KL.field: divergence / targets}

    def ends_run(self, trainer: LoopState) -> bool:
        limit, opened = self._loop.run.opened.recipe.kept.max_kl, self._loop.run.opened
        measured = [each[KEPT_KL.field] for each in self._loop.metrics.records if KEPT_KL.field in each]
        last = ranks.gather_objects(measured[-1])[0]
        if limit is None or (last is not None and last <= limit):
            return False
        shown = "not finite" if last is None else f"{last:.4g}"
        why = f"{KEPT_KL.name} is {shown}, above {limit:g} nats a token (kept.max_kl)"
        opened.facts["ended early"] = why
        self._loop.metrics.tell(f"ended after step {trainer.global_step}: {why}")
        self._loop.save(trainer)
        return True

    def _remember(self, found: torch.Tensor, _: torch.Tensor) -> None:
        ids = found.topk(min(MOST_TOKENS, found.shape[1])).indices
        self._start.append((among(found, ids).cpu(), ids.int().cpu()))

    def _run(self, batch: Batch, use: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Calls `use` with log-probabilities (n, V) and targets (n,) of some tokens at a time. Collective."""
        causal = self._causal
        batch = send_to_device(causal.on_host(batch), self._device)
        if isinstance(causal.head_loss, str):
            logits, targets = causal.predictions(self._model, batch)
            use(logits.log_softmax(dim=1), targets)
            return

        def in_chunks(hidden: torch.Tensor, weight: Any, bias: Any, chosen: Any, after: AfterHead) -> torch.Tensor:
            how = how_of(hidden, weight, bias, after)
            head = replace(how.head(weight, bias), entries=ENTRIES)
            for rows in head.chunks(len(hidden)):
                use(head.logits(hidden[rows].to(how.dtype))[0].log_softmax(dim=1), chosen[rows])
            return hidden.new_zeros((1, 1, 1))

        inputs, targets = causal.inputs(batch), causal.targets(batch)
        with rows_of(batch):
            causal.head_loss.run(in_chunks, self._model, inputs, targets, batch.get("counted"))


def among(found: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities (n, K + 1): those of the tokens `ids` (n, K) among (n, V), and of all others together.

    The divergence of two of them is at most that of all tokens, and is equal with K = V.
    """
    others = found.scatter(1, ids.long(), -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([found.gather(1, ids.long()), others], dim=1).clamp_min(SMALLEST)

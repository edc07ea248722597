"""The origin of an export, as a file in it: enough to train it again, and to find what differs now."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError
from toolkit.model.weights import fit_of
from toolkit.pages.card import recipe_for_readers
from toolkit.paths import ORIGIN
from toolkit.run.stages import OpenedRun, PreparedRun


@dataclass(frozen=True)
class Origin:
    """The inputs and the environment of a run. Folders and files are named without their paths, as in the model card.

    Attributes:
        recipe: the resolved recipe, as YAML for readers.
        ranks: number of processes.
        device: cpu or cuda.
        strategy: the sharding strategy, as `toolkit train --strategy` takes it.
        precision: Accelerate's mixed precision: no, bf16 or fp16.
        data: fingerprint of the rows, the tokenizer and how samples are made of them.
        content: digest of a stream's files, or None without a stream.
        base: fingerprint of the weights that training began with, or None for random weights.
        teacher: fingerprint of the model that was learned from, or None.
        versions: versions of packages, and the machine.
        adapter: fingerprint of the adapter that training went on from, or None.
        scorer: fingerprint of the source of the user's function that scored answers, or None.
    """

    recipe: str
    ranks: int
    device: str
    strategy: str
    precision: str
    data: str
    content: str | None
    base: str | None
    teacher: str | None
    versions: dict[str, str]
    adapter: str | None = None
    scorer: str | None = None

    def write(self, export: Path) -> None:
        """Writes the origin into an export."""
        (export / ORIGIN).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, export: Path) -> Origin:
        """Reads the origin of an export.

        Raises:
            BadInputError: if it has none, or a damaged one.
        """
        path = export / ORIGIN
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            # Earlier versions could not go on from an adapter, and had no functions of the user's.
            found = {"adapter": None, "scorer": None, **found}
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except FileNotFoundError:
            raise BadInputError(
                f"{str(export)!r} has no {ORIGIN}, which a run writes into its export; name the export of a run that "
                "this version trained (what `toolkit export` makes of a checkpoint has none)"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInputError(f"{str(path)!r} is damaged ({type(error).__name__}); name another export") from error


def origin_of(opened: OpenedRun, run: PreparedRun, versions: dict[str, str]) -> Origin:
    """Returns the origin of the run's export."""
    return Origin(
        recipe_for_readers(opened.recipe),
        opened.accelerator.num_processes,
        opened.device.type,
        opened.plugin.text,
        opened.accelerator.mixed_precision,
        run.data.fingerprint,
        run.data.content,
        fit_of(run.inner).origin,
        run.teacher_fingerprint,
        versions,
        fit_of(run.inner).adapter,
        run.asked.scorer,
    )

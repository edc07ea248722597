"""Shows a plan as a table, the parts of a row, or JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from toolkit.cli.shared.console import print_table
from toolkit.errors import counted
from toolkit.model.part_sizes import describe_parts
from toolkit.paths import GIB
from toolkit.planning.launch import LaunchCommand
from toolkit.planning.planner import CONTEXT_BYTES, HEADROOM, PlanRow
from toolkit.planning.setup import Setup
from toolkit.planning.table import Plan

SHOWN = 24
"""Most rows of a table on the console."""

MOMENTS = 12
"""Most moments of a step that `explain` prints."""


def gib(num_bytes: float) -> str:
    """Formats bytes as GiB, with fewer digits for larger numbers."""
    if not num_bytes:
        return "0"
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB else f"{num_bytes / GIB:.3g}"


def show(console: Console, plan: Plan, launch: LaunchCommand | None, every_row: bool) -> None:
    """Prints the table, the row to pick, and what would help if nothing fits."""
    hardware = plan.hardware
    trained = "" if plan.num_trained == plan.num_parameters else f", {plan.num_trained:,} trained"
    precision = "fp32" if plan.mixed_precision == "no" else plan.mixed_precision
    console.print(
        f"{plan.num_parameters:,} parameters{trained}; {plan.ranks} x {hardware.name}, "
        f"{hardware.memory_bytes / GIB:.0f} GiB each; {precision} precision, "
        f"samples of {plan.recipe.data.max_length} tokens{' with images' if plan.has_images else ''}",
        markup=False,
    )
    if plan.parts:
        console.print(f"parts: {describe_parts(plan.parts)}", markup=False)
    rows = plan.rows if every_row else plan.rows[:SHOWN]
    cells = [_cells(row, plan) for row in rows]
    print_table(list(cells[0]), [list(row.values()) for row in cells])
    context = gib(CONTEXT_BYTES[hardware.device_type])
    console.print(
        "GiB: peak of one rank; host of one node; sent by one rank in a step, and between nodes by one node. "
        f"fits: {HEADROOM['fits']} x peak + {context} GiB; tight: {HEADROOM['tight']} x peak + {context} GiB",
        markup=False,
    )
    if len(rows) < len(plan.rows):
        console.print(f"and {len(plan.rows) - len(rows)} more (--all)", markup=False)
    asked = plan.asked
    console.print(
        f"the recipe as it is: {asked.setup.name}, checkpoints {asked.setup.checkpoints}, micro-batch "
        f"{asked.setup.micro_batch_size}: {asked.verdict}, peak {gib(asked.peak.total)} GiB in {said(asked)}"
        + (f" ({asked.problem})" if asked.problem else ""),
        markup=False,
    )
    if asked.dealing:
        console.print(f"  experts: {asked.dealing}", markup=False)
    for lever in plan.levers:
        console.print(f"  {lever.change}: {gib(lever.row.need)} GiB needed: {lever.row.verdict}", markup=False)
    if plan.recommended is None or launch is None:
        console.print(f"recommended: nothing: {plan.reason}", markup=False)
        return
    setup = plan.recommended.setup
    console.print(
        f"recommended: {setup.name}, checkpoints {setup.checkpoints}, micro-batch {setup.micro_batch_size} x "
        f"{setup.accumulation}{_shared_rows_text(setup)}: {plan.reason}",
        markup=False,
    )
    console.print(launch.command, markup=False, soft_wrap=True, style="bold")
    for note in launch.notes:
        console.print(f"  ({note})", markup=False)


def _shared_rows_text(setup: Setup) -> str:
    return "" if setup.sequence in (None, 1) else f", rows shared by {setup.sequence} ranks"


def said(row: PlanRow) -> str:
    """Describes the moment of the peak, with its largest parts."""
    kind, num_bytes = row.peak.largest
    return f"{row.peak.moment}: {kind} {gib(num_bytes)} GiB"


def _cells(row: PlanRow, plan: Plan) -> dict[str, str]:
    """Returns the cells of a row, by column."""
    setup = row.setup
    return {
        "": f"{row.verdict}{'*' if row is plan.recommended else ''}",
        "strategy": setup.name,
        "checkpoints": setup.checkpoints,
        "micro-batch": f"{setup.micro_batch_size} x {setup.accumulation}",
        **_cells_of_shared_rows(row, plan),
        "peak": gib(row.peak.total),
        "peak in": row.peak.moment,
        "host": gib(row.host_bytes) if row.host_bytes else "",
        "sent": gib(row.traffic.sent) if row.traffic.sent else "",
        **({"between nodes": gib(row.between_nodes)} if plan.ranks > plan.hardware.devices_per_node else {}),
    }


def _cells_of_shared_rows(row: PlanRow, plan: Plan) -> dict[str, str]:
    """Returns the ranks that share a row or cut matrices, and what a rank exchanges with them; empty if none do."""
    if all(other.traffic.sequence == other.setup.mesh.tensor == 1 for other in plan.rows):
        return {}
    exchanged = row.traffic.exchanged + row.traffic.partial
    return {"sequence": str(row.traffic.sequence), "exchanged": gib(exchanged) if exchanged else ""}


def explain(console: Console, plan: Plan, row: PlanRow) -> None:
    """Prints the parts of a row's peak, the largest moments of a step, and what its collectives carry."""
    setup, traffic, gathered_in = row.setup, row.traffic, row.setup.mesh.reshard_after_forward
    moments = sorted(row.moments, key=lambda moment: -moment.total)[:MOMENTS]
    lines = [
        f"{setup.name}, checkpoints {setup.checkpoints}, micro-batch {setup.micro_batch_size} x {setup.accumulation}; "
        f"{setup.mesh.shard * setup.mesh.tensor} ranks share one copy",
        f"peak {gib(row.peak.total)} GiB, in {row.peak.moment}:",
        *(f"  {gib(size):>7}  {part}" for part, size in row.peak.parts().items()),
        f"need {gib(row.need)} GiB of {plan.hardware.memory_bytes / GIB:.0f}: {row.verdict} {row.problem}",
        "the largest moments of a step (GiB):",
        *(f"  {gib(moment.total):>7}  {moment.moment}" for moment in moments),
        "whole tensors that collectives carry in a step (GiB; a rank of a ring sends (N - 1) / N of them):",
        *(f"  {gib(size):>7}  {kind}, in {traffic.calls[kind]} calls" for kind, size in traffic.whole.items()),
    ]
    if gathered_in:
        backward = gib(traffic.whole["all_gather"] - traffic.forward_all_gather)
        lines.append(f"  {backward:>7}  of all_gather in backward, inside groups of {counted(gathered_in, 'rank')}")
    if setup.offload:
        lines.append(f"  {gib(traffic.device_to_host):>7}  to the host, {gib(traffic.host_to_device)} GiB back")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def as_json(plan: Plan, launch: LaunchCommand | None) -> dict[str, Any]:
    """Returns the whole plan as JSON, in bytes."""
    return {
        "parameters": plan.num_parameters,
        "trained": plan.num_trained,
        "parts": {part: dataclasses.asdict(size) for part, size in plan.parts.items()},
        "ranks": plan.ranks,
        "hardware": dataclasses.asdict(plan.hardware),
        "mixed_precision": plan.mixed_precision,
        "images": plan.has_images,
        "rows": [row_as_json(row) for row in plan.rows],
        "asked": row_as_json(plan.asked),
        "recommended": None if plan.recommended is None else row_as_json(plan.recommended),
        "reason": plan.reason,
        "levers": [{"change": lever.change, **row_as_json(lever.row)} for lever in plan.levers],
        "command": None if launch is None else launch.command,
    }


def row_as_json(row: PlanRow) -> dict[str, Any]:
    setup = row.setup
    return {
        "strategy": setup.strategy.name,
        "offload": setup.offload,
        "replicate": setup.mesh.replicate,
        "shard": setup.mesh.shard,
        "reshard_after_forward": setup.mesh.reshard_after_forward,
        "by_block": setup.by_block,
        "checkpointing": None if setup.checkpointing is None else dataclasses.asdict(setup.checkpointing),
        "micro_batch_size": setup.micro_batch_size,
        "sequence": row.traffic.sequence,
        "tensor": setup.mesh.tensor,
        "gradient_accumulation_steps": setup.accumulation,
        "peak": {"moment": row.peak.moment, "total": row.peak.total, **row.peak.parts()},
        "need": row.need,
        "host": row.host_bytes,
        "sent": row.traffic.sent,
        "exchanged": row.traffic.exchanged + row.traffic.partial,
        "between_nodes": row.between_nodes,
        "traffic": row.traffic.whole,
        "verdict": row.verdict,
        "problem": row.problem,
        "dealing": row.dealing,
    }

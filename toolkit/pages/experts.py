"""How the experts are used, on the page of a run: each one's share of the choices, a row for each router."""

from __future__ import annotations

from toolkit.errors import counted
from toolkit.pages.page import card, card_head
from toolkit.pages.run_metrics import Metrics

BRIGHTEST = 2.0
"""Times the even share from which on a cell is as strong as can be."""


def experts_card(train: Metrics) -> str:
    """The loads that were last recorded; nothing where the model has no experts."""
    line = next((line for line in reversed(train) if line.get("expert_load")), None)
    if line is None:
        return ""
    loads: list[list[float]] = line["expert_load"]
    dead = sum(share == 0 for layer in loads for share in layer)
    remark = f"share of the choices by expert, a row for each router; steps up to {line['step']:,}"
    told = f"{counted(len(loads), 'router')} of {counted(len(loads[0]), 'expert')}; {dead or 'none'} without a token"
    rows = "".join(_row(number, layer) for number, layer in enumerate(loads))
    table = f'<div class="scroll"><table class="loads"><tbody>{rows}</tbody></table></div>'
    return card("experts", f'{card_head("Load of the experts", "", remark)}<p class="muted">{told}</p>{table}')


def _row(number: int, layer: list[float]) -> str:
    return f"<tr><td>{number}</td>{''.join(_cell(share, len(layer)) for share in layer)}</tr>"


def _cell(share: float, num_experts: int) -> str:
    """Stronger with the load; a dead expert is marked. Numbers fit where there are few experts."""
    percent = 70 * min(1.0, share * num_experts / BRIGHTEST)
    text = f"{share:.0%}" if num_experts <= 16 else ""
    if share == 0:
        return f'<td class="dead" title="{share:.2%}">{text}</td>'
    color = f"color-mix(in srgb, var(--chart-1) {percent:.0f}%, var(--card))"
    return f'<td title="{share:.2%}" style="background: {color}">{text}</td>'


STYLE = """
.loads td { text-align: right; padding: 4px 6px; min-width: 6px; border: 1px solid var(--card); }
.loads td.dead { background: var(--warn-page); outline: 1px solid var(--warn); outline-offset: -2px; }
"""

"""Draws block tables and the block pool at one step."""

from __future__ import annotations

from chairlift_lab.explain.recording import StepRecord
from chairlift_lab.explain.sheet import Panel


def block_state(step: StepRecord, block: int) -> str:
    """The state of a block: shared (in several tables), own (in one), reusable (cached, in none) or free."""
    references = step.references[block]
    if references:
        return "shared" if references > 1 else "own"
    return "reusable" if block in step.cached else "free"


def draw_pool(panel: Panel, step: StepRecord, *, columns: int) -> None:
    """Draw every block with its number and its reference count."""
    for block, references in enumerate(step.references):
        kind = block_state(step, block)
        x, y = block % columns, block // columns
        look = panel.theme.look(kind)
        panel.cell(x, y, kind)
        panel.text(x + 0.5, y + 0.36, str(block), color=look.ink, size=9.5)
        if references:
            panel.text(x + 0.5, y + 0.74, f"×{references}", color=look.ink, size=7.5)
    panel.grid_only(columns, -(-len(step.references) // columns))
    panel.axes.set_anchor("NW")
    panel.axes.set_xticks([])
    panel.axes.set_yticks([])

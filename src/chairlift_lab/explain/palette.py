"""One set of colours for all pictures, distinguishable for colour-blind readers (after Okabe and Ito)."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.errors import InvalidParameter

BLUE, SKY, GREEN, ORANGE, RED, PINK, YELLOW = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#F0E442",
)
DARK_INK, LIGHT_INK = "#1c2430", "#ffffff"


@dataclass(frozen=True, slots=True)
class Look:
    """Fill, hatch and ink of one kind of cell. Hatches carry the same information as colours."""

    fill: str
    ink: str = DARK_INK  # of text on it
    hatch: str = ""
    edge: str | None = None  # of the hatch; the background's colour if None


@dataclass(frozen=True, slots=True)
class Theme:
    name: str
    background: str
    ink: str
    muted: str  # less important words, lines and ticks
    faint: str  # empty cells
    hidden: str  # lines of a hatch
    tint: str  # a little green

    def look(self, kind: str) -> Look:
        """The look of a kind of cell."""
        own = {
            "empty": Look(self.faint, self.muted),
            "skipped": Look(self.faint, self.muted),
            "masked": Look(self.faint, self.muted),
            "free": Look(self.faint, self.muted),
            "reusable": Look(self.tint, self.ink, "", GREEN),
            "idle": Look(self.background, self.muted, "////", RED),
            "blocked": Look(self.background, self.muted, "....", RED),
            "padding": Look(self.faint, self.muted, "xxxx", self.hidden),
        }
        look = own.get(kind) or _LOOKS.get(kind)
        if look is None:
            raise InvalidParameter("kind", f"{kind!r} has no look; known: {', '.join((*own, *_LOOKS))}")
        return look

    def owner(self, index: int) -> Look:
        """The look of the blocks of request number `index`."""
        return _OWNERS[index % len(_OWNERS)]


_LOOKS = {
    "prefill": Look(BLUE, LIGHT_INK),
    "decode": Look(ORANGE),
    "new": Look(BLUE, LIGHT_INK),
    "cached": Look(GREEN, LIGHT_INK),
    "useful": Look(GREEN, LIGHT_INK),
    "shared": Look(GREEN, LIGHT_INK),
    "recomputed": Look(RED, LIGHT_INK),
    "copied": Look(PINK),
    "own": Look(SKY),
    "query": Look(BLUE, LIGHT_INK),
    "key": Look(ORANGE),
    "loaded": Look(SKY),
    "held": Look(ORANGE),
    "accepted": Look(GREEN, LIGHT_INK),
    "rejected": Look(RED, LIGHT_INK),
}
_OWNERS = (
    Look(SKY),
    Look(ORANGE),
    Look(GREEN, LIGHT_INK),
    Look(PINK),
    Look(BLUE, LIGHT_INK),
    Look(RED, LIGHT_INK),
    Look(YELLOW),
)

LIGHT = Theme("light", "#ffffff", "#1c2430", "#5b6673", "#e9edf2", "#a9b4c0", "#d3f0e6")
DARK = Theme("dark", "#14181f", "#e8edf3", "#9aa7b5", "#272e39", "#5a6675", "#16382f")
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}

"""Picture of the rooms of zerocheck: `python docs/architecture/draw.py` writes the two SVGs.

The data are here: floors from the top down, and the way of a case. `check` compares them with the
packages that exist, and tests/test_architecture.py with the imports that are allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent / "zerocheck"


class Floor(NamedTuple):
    """One floor: its name, and its rooms from left to right with the width of each in pixels."""

    name: str
    rooms: dict[str, int]


FLOORS = (
    Floor("faces", {"cli": 45, "testing": 65, "attached": 75, "job_metrics": 90, "integrations": 95,
                    "kill_matrix": 90, "memory": 70, "checkpoint": 90, "script": 55, "report": 65}),
    Floor("engine", {"run": 830}),
    Floor("peers", {"ranks": 170, " ": 40, "drive": 200, "  ": 90, "judge": 190}),
    Floor("proof", {"faults": 170}),
    Floor("libraries", {"   ": 220, "adapters": 200}),
    Floor("data", {"protocol": 90, "contract": 90, "models": 80, "optimizers": 100, "causes": 80,
                   "execution": 90, "case": 60, "machine": 75}),
)  # fmt: skip
"""Blanks leave room. A room imports from its own floor and those under it."""

FILES = {"testing": ("pytest_plugin.py", "strategies.py")}
"""Files beside the packages that belong to the room of one."""


class Move(NamedTuple):
    """One move of a case: from room to room, with a label."""

    start: str
    end: str
    label: str


WAY = (
    Move("cli", "run", "1 options"),
    Move("run", "ranks", "2 case as jobs"),
    Move("ranks", "drive", "3 job"),
    Move("drive", "adapters", "4 steps"),
    Move("drive", "judge", "5 observations"),
    Move("judge", "run", "6 verdicts"),
    Move("run", "report", "7 journal"),
)
"""From the command line to a report."""

THEMES = {
    "light": {"ink": "#1f2328", "line": "#8c959f", "room": "#ffffff", "floor": "#f3f5f7",
              "way": "#0b5fcc"},
    "dark": {"ink": "#e6edf3", "line": "#6e7681", "room": "#161b22", "floor": "#21262d",
             "way": "#6cb6ff"},
}  # fmt: skip

LEFT, GAP, HEIGHT, SPACE = 92, 10, 34, 26
"""Pixels: the column of floor names, between rooms, of a room, between floors."""
WIDTH = LEFT + 830 + 2 * GAP
PAD = 8


class Box(NamedTuple):
    """Place of a room: left, top, width."""

    x: int
    y: int
    width: int


def check() -> None:
    """Raise ValueError unless the rooms are the packages that exist, and the files do."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    rooms = [name for floor in FLOORS for name in floor.rooms if name.strip()]
    if len(rooms) != len({*rooms}) or {*rooms} != packages:
        raise ValueError(f"not drawn, or gone: {sorted({*rooms} ^ packages)}")
    for name in (name for names in FILES.values() for name in names):
        if not (PACKAGE / name).exists():
            raise ValueError(f"no such file: {name}")


def floor_of(room: str) -> int:
    """Return the floor of a room, 0 for the highest."""
    return next(number for number, floor in enumerate(FLOORS) if room in floor.rooms)


def boxes() -> dict[str, Box]:
    """Return the place of every room."""
    places = {}
    for number, floor in enumerate(FLOORS):
        x = LEFT + GAP
        for name, width in floor.rooms.items():
            places[name] = Box(x, top_of(number) + PAD, width)
            x += width + GAP
    return places


def top_of(floor: int) -> int:
    """Return the top of a floor in pixels."""
    return 4 + floor * (HEIGHT + 2 * PAD + SPACE)


def arrow(move: Move, places: dict[str, Box], colour: str) -> str:
    """Return an arrow with its label: across within a floor, else straight down or up."""
    start, end = places[move.start], places[move.end]
    if start.y == end.y:
        y = start.y + HEIGHT // 2
        ends = (start.x + start.width, y, end.x - 1, y)
        at = ((ends[0] + ends[2]) // 2, y - 6, "middle")
    else:
        x = next(one for one in (start, end) if one.width < 700)
        middle = x.x + x.width // 2
        down = end.y > start.y
        ends = (middle, start.y + HEIGHT * down, middle, end.y + HEIGHT * (not down))
        floors = abs(floor_of(move.start) - floor_of(move.end))
        labelled = max(start.y, end.y) - PAD - SPACE // 2 + 4 - (floors - 1) * 24
        right = middle < WIDTH - 100
        at = (middle + 6 if right else middle - 6, labelled, "start" if right else "end")
    x1, y1, x2, y2 = ends
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="2" '
        f'marker-end="url(#tip)"/>\n'
        f'<text x="{at[0]}" y="{at[1]}" text-anchor="{at[2]}" fill="{colour}" '
        f'font-size="12">{move.label}</text>'
    )


def render(theme: str) -> str:
    """Return the picture as SVG in the colours of a theme."""
    check()
    colours, places = THEMES[theme], boxes()
    height = top_of(len(FLOORS)) - SPACE + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" role="img">',
        "<title>Rooms of zerocheck by floor, and the way of a case through them</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{colours["way"]}"/>'
        "</marker></defs>",
    ]
    for number, floor in enumerate(FLOORS):
        y = top_of(number)
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 2}" height="{HEIGHT + 2 * PAD}" '
            f'rx="6" fill="{colours["floor"]}"/>\n'
            f'<text x="{LEFT - 10}" y="{y + PAD + 22}" text-anchor="end" fill="{colours["ink"]}" '
            f'font-size="14" font-weight="bold">{floor.name}</text>'
        )
    for name, box in places.items():
        if name.strip():
            parts.append(
                f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{HEIGHT}" rx="5" '
                f'fill="{colours["room"]}" stroke="{colours["line"]}"/>\n'
                f'<text x="{box.x + box.width // 2}" y="{box.y + 22}" text-anchor="middle" '
                f'fill="{colours["ink"]}" font-size="14">{name}</text>'
            )
    parts += [arrow(move, places, colours["way"]) for move in WAY]
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Write the picture in each theme."""
    for theme in THEMES:
        (HERE / f"rooms-{theme}.svg").write_text(render(theme), encoding="utf-8")


if __name__ == "__main__":
    main()

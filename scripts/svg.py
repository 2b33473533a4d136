"""Small drawings as SVG, for the pictures in the documents."""
from __future__ import annotations

from html import escape

COLOURS = ["#1f6feb", "#d1495b", "#edae49", "#2a9d8f", "#7b5ea7", "#8d6e63"]
GREY = "#57606a"


class Drawing:
    """Shapes on white, in units of a pixel."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.shapes: list[str] = []

    def text(self, x: float, y: float, content: str, *, anchor: str = "start", size: int = 12, fill: str = "#24292f",
             bold: bool = False) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{weight}>'
            f"{escape(content, quote=False)}</text>"
        )

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{fill}" stroke="{stroke}"/>'
        )

    def line(self, points: list[tuple[float, float]], stroke: str, width: float = 1.5) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"/>')

    def dot(self, x: float, y: float, fill: str, radius: float = 3) -> None:
        self.shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" '
            f'height="{self.height:g}" font-family="system-ui, sans-serif">'
        )
        return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *self.shapes, "</svg>\n"])

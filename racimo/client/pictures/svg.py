"""A scene as SVG text."""

from html import escape

from racimo.client.pictures.scene import PAPER, Box, Dot, Line, Mark, Scene, Words

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def to_svg(scene: Scene) -> str:
    body = "\n".join(_mark(mark) for mark in scene.marks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {scene.width} {scene.height}" width="{scene.width}" '
        f'font-family="{FONT}">\n<rect width="100%" height="100%" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


def _mark(mark: Mark) -> str:
    match mark:
        case Line():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
            shape = f'points="{points}" fill="none" stroke="{mark.colour}" stroke-width="{mark.width:g}"'
            opacity = f' stroke-opacity="{mark.opacity:g}"' if mark.opacity < 1 else ""
            return _closed("polyline", f'{shape} stroke-linejoin="round"{opacity}', mark.title)
        case Dot():
            shape = f'cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="{mark.radius:g}" fill="{mark.colour}"'
            return _closed("circle", shape + _opacity(mark.opacity), mark.title)
        case Box():
            shape = f'x="{mark.x:.1f}" y="{mark.y:.1f}" width="{mark.width:.1f}" height="{mark.height:.1f}"'
            return _closed("rect", f'{shape} fill="{mark.colour}"{_opacity(mark.opacity)}', mark.title)
        case Words():
            place = f'x="{mark.x:.1f}" y="{mark.y:.1f}" font-size="{mark.size:g}" fill="{mark.colour}"'
            anchor = f' text-anchor="{mark.anchor}"' if mark.anchor != "start" else ""
            weight = ' font-weight="600"' if mark.bold else ""
            return f"<text {place}{anchor}{weight}>{escape(mark.text)}</text>"


def _opacity(opacity: float) -> str:
    return f' fill-opacity="{opacity:g}"' if opacity < 1 else ""


def _closed(tag: str, attributes: str, title: str) -> str:
    return f"<{tag} {attributes}><title>{escape(title)}</title></{tag}>" if title else f"<{tag} {attributes}/>"

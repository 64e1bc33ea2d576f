"""Curves of bounded length."""

from racimo.state.trials import MAX_CURVE_POINTS


def thinned(curve: list[tuple[int, float]], point: tuple[int, float]) -> list[tuple[int, float]]:
    """With one point more; where that is too many, every second point of the older half goes."""
    if len(curve) < MAX_CURVE_POINTS:
        return [*curve, point]
    half = len(curve) // 2
    return [*curve[:half:2], *curve[half:], point]

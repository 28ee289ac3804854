"""Pictures. matplotlib is imported only here, and only when one is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError

if TYPE_CHECKING:
    from ctxext.inspection import Inspection


def plot_wavelengths(inspection: Inspection, path: str | os.PathLike[str]) -> None:
    """Wavelength of every dimension before and after, against trained and target length."""
    figure, axes = _figure()
    base = [2 * 3.141592653589793 / f for f in inspection.base_inv_freq]
    live = [2 * 3.141592653589793 / f for f in inspection.inv_freq]
    name = inspection.method["name"] if inspection.method else inspection.scaling
    axes.semilogy(base, color="0.55", linestyle="--", marker=".", label="as trained")
    axes.semilogy(live, color="C0", marker=".", label=name)
    axes.axhline(inspection.original_max_position_embeddings, color="C2", linewidth=1, label="trained length")
    axes.axhline(inspection.max_position_embeddings, color="C3", linewidth=1, label="target length")
    axes.set(
        xlabel="dimension (index of frequency)",
        ylabel="wavelength in tokens",
        title=f"{inspection.model_type}: {name}, {inspection.original_max_position_embeddings:,} to "
        f"{inspection.max_position_embeddings:,} tokens",
    )
    axes.legend(frameon=False)
    _save(figure, path)


def _figure(width: float = 7.0, height: float = 4.2, columns: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CtxextError('pictures need matplotlib: pip install "ctxext[plot]"') from None
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise CtxextError(f"{path}: the picture can't be written: {error}") from None

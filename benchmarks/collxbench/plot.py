"""Time over size, as a picture."""

from pathlib import Path

from collxbench.call import Kind
from collxbench.op import Op
from collxbench.runner import Results
from collxbench.units import size_name


def draw(file: Path, op: Op, results: Results, wire_gbs: float | None) -> None:
    """All lines on logarithmic axes; dashed: the wire limit at `wire_gbs` (10^9 bytes/s)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in results.rows if r.record.us is not None and not r.record.is_host_time]
    figure, axes = pyplot.subplots(figsize=(9, 6))
    for label in dict.fromkeys(row.label for row in rows):
        points = sorted((r.record.bytes, r.record.us) for r in rows if r.label == label)
        ours = any(r.kind is Kind.OURS for r in rows if r.label == label)
        axes.plot(
            *zip(*points, strict=True), marker="o", label=label, linewidth=2.5 if ours else 1.2
        )
    sizes = sorted({row.record.bytes for row in rows})
    if wire_gbs and rows:
        world = rows[0].record.world
        limit = [op.bytes_on_link(nbytes, world) / (wire_gbs * 1e3) for nbytes in sizes]
        axes.plot(sizes, limit, "k--", label=f"wire limit, {wire_gbs:g} GB/s")
        axes.set_ylim(bottom=min(r.record.us for r in rows if r.record.us) / 2)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds per call")
    axes.set_xticks(sizes, [size_name(nbytes) for nbytes in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if rows:
        first = rows[0].record
        axes.set_title(f"{first.op}, {first.dtype}, {first.world} ranks, {first.device}")
        axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)

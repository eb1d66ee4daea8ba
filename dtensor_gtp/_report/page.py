"""A report as a page: one fragment of HTML with its own style, without scripts, fonts or files from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from .._comm.debug import format_nbytes
from .facts import Facts
from .pictures import legend, strip, timeline
from .text import folded_rows

_STYLE = """
.gtp-report {
  color-scheme: light dark;
  --text: #1f2328; --faint: #59636e; --back: #ffffff; --line: #d1d9e0; --panel: #f6f8fa;
  --ahead: #b6d3f7; --used: #2f6fc4; --bytes: #8fbf9f; --bar: #dbe9fd; --own: #1f2328;
  background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; padding: 20px 24px;
}
@media (prefers-color-scheme: dark) {
  .gtp-report {
    --text: #e6edf3; --faint: #9aa4af; --back: #0d1117; --line: #3d444d; --panel: #161b22;
    --ahead: #27476f; --used: #6aa9f7; --bytes: #4a7a5a; --bar: #1d3557; --own: #ffffff;
  }
}
.gtp-report h1 { font-size: 20px; margin: 0 0 12px; font-weight: 600; }
.gtp-report h2 { font-size: 16px; margin: 28px 0 4px; font-weight: 600; }
.gtp-report h3 { font-size: 14px; margin: 18px 0 4px; font-weight: 600; }
.gtp-report p { margin: 0 0 8px; color: var(--faint); max-width: 100ch; }
.gtp-report .tiles { display: flex; flex-wrap: wrap; gap: 12px; }
.gtp-report .tile { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 8px 14px; }
.gtp-report .tile b { display: block; font-size: 18px; font-weight: 600; }
.gtp-report .tile span { color: var(--faint); }
.gtp-report .scroll { overflow-x: auto; }
.gtp-report table { border-collapse: collapse; font-size: 13px; margin: 0; }
.gtp-report th, .gtp-report td {
  text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); vertical-align: middle;
  white-space: nowrap; background: none; color: var(--text);
}
.gtp-report th { color: var(--faint); font-weight: 600; }
.gtp-report td.use { white-space: normal; min-width: 16ch; max-width: 44ch; }
.gtp-report td.amount { min-width: 15ch; }
.gtp-report td.amount div { background: var(--bar); padding: 1px 0 1px 4px; white-space: nowrap; overflow: visible; }
.gtp-report td small { display: block; color: var(--faint); font-size: 12px; }
.gtp-report code { font: 12.5px ui-monospace, monospace; background: none; color: inherit; padding: 0; }
.gtp-report svg { display: block; font: 11px ui-monospace, monospace; }
.gtp-report svg text { fill: var(--text); }
.gtp-report svg line { stroke: var(--line); }
.gtp-report .part rect { stroke: var(--back); stroke-width: 1; }
.gtp-report .part text { fill: #1f2328; text-anchor: middle; font-size: 12px; }
.gtp-report .part.own rect { stroke: var(--own); stroke-width: 2; }
.gtp-report .part.own text { font-weight: 700; }
.gtp-report .t0 rect { fill: #9ecbff; } .gtp-report .t1 rect { fill: #ffc78a; }
.gtp-report .t2 rect { fill: #a6dba8; } .gtp-report .t3 rect { fill: #e0b3f0; }
.gtp-report .t4 rect { fill: #ffb3ba; } .gtp-report .t5 rect { fill: #b8dde0; }
.gtp-report .t6 rect { fill: #e6d98a; } .gtp-report .t7 rect { fill: #c3c9e8; }
.gtp-report .ahead { fill: var(--ahead); } .gtp-report .used { fill: var(--used); }
.gtp-report .bytes rect { fill: var(--bytes); }
.gtp-report .gap { fill: var(--panel); stroke: var(--line); stroke-dasharray: 3 3; }
.gtp-report .key { display: inline-block; width: 22px; height: 11px; border-radius: 3px; margin: 0 4px 0 0; }
.gtp-report dl { margin: 0; display: grid; grid-template-columns: fit-content(45%) minmax(0, 1fr); gap: 2px 18px; }
.gtp-report dt, .gtp-report dd { overflow-wrap: anywhere; }
.gtp-report dt { font-weight: 600; } .gtp-report dd { margin: 0; color: var(--faint); }
"""


def fragment(facts: Facts) -> str:
    """The report as a ``<div>`` for a page or a notebook."""
    parts = [
        f"<style>{_STYLE}</style>",
        f"<h1>gtp_shard on {escape(facts.mesh)}</h1>",
        _tiles(facts),
        _parameters(facts),
    ]
    parts += _timelines(facts)
    if facts.choices:
        parts += ["<h2>Choices</h2>", _choices((*facts.choices, *facts.prediction))]
    if facts.advice:
        parts += ["<h2>Next</h2>", *(f"<p>{escape(text)}</p>" for text in facts.advice)]
    return f'<div class="gtp-report">{"".join(parts)}</div>'


def page(facts: Facts) -> str:
    """The report as a whole page."""
    title = escape(f"gtp_shard on {facts.mesh}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    style = "<style>html { color-scheme: light dark; } body { margin: 0; }</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}{style}</head><body>{fragment(facts)}</body></html>\n'


def _tiles(facts: Facts) -> str:
    tiles = [("of parameters on this rank", facts.local_nbytes), ("the largest gathered weight", facts.largest_nbytes)]
    for is_backward, name in ((False, "forward"), (True, "backward")):
        most = facts.most_gathered(is_backward)
        if most is not None:
            tiles.append((f"of gathered weights at most in {name}", most))
    if facts.symmetric_nbytes:
        tiles.append(("of memory that peers copy from", facts.symmetric_nbytes))
    drawn = (f'<div class="tile"><b>{format_nbytes(nbytes)}</b><span>{name}</span></div>' for name, nbytes in tiles)
    return f'<div class="tiles">{"".join(drawn)}</div>'


def _parameters(facts: Facts) -> str:
    all_folded = folded_rows(facts.rows, facts.is_verbose)
    most_local = max((times * row.local_nbytes for _, times, row in all_folded), default=0)
    lines = []
    for folded in all_folded:
        name, times, row = folded
        shape = " x ".join(map(str, row.shape)) or "scalar"
        picture = strip(row) or "<small>whole on every rank</small>"
        if not row.cuts:
            picture = "<small>not managed</small>"
        gathered = _amount(format_nbytes(row.gathered_nbytes), row.gathered_nbytes, facts.largest_nbytes)
        cells = (
            f"<td><code>{escape(name)}</code><small>{shape}, {escape(folded.dtype)}</small></td>",
            f"<td>{picture}</td>",
            f"<td><code>{escape(row.placements)}</code><small>{escape(legend(row))}</small></td>",
            f'<td class="amount">{_amount(folded.local, times * row.local_nbytes, most_local)}</td>',
            f'<td class="amount">{gathered if row.gathered_nbytes else "<small>-</small>"}</td>',
            f'<td class="use">{escape(row.use)}</td>',
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    titles = ("parameter", "who holds which part", "placements", "on this rank", "gathered", "use")
    head = "".join(f"<th>{title}</th>" for title in titles)
    about = (
        "A strip is a parameter, from the first to the last row of the dim that is cut. Each part has the coordinate "
        "of the ranks that hold it; that of this rank has a frame. Point at a part to see its rows."
    )
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    return f"<h2>Parameters</h2><p>{about}</p>{table}"


def _amount(text: str, nbytes: int, most: int) -> str:
    share = 100 * nbytes / most if most else 0
    return f'<div style="background: linear-gradient(to right, var(--bar) {share:.1f}%, transparent 0)">{text}</div>'


def _timelines(facts: Facts) -> Iterator[str]:
    yield "<h2>Plan</h2>"
    if not facts.plans:
        yield "<p>Not observed yet. Run a forward and a backward first.</p>"
        return
    keys = (("ahead", "gathered, from its launch on"), ("used", "in use"), ("bytes", "bytes in memory"))
    named = "; ".join(f'<span class="key" style="background: var(--{key})"></span>{text}' for key, text in keys)
    yield f"<p>{named}. Each column is one use of a weight. Point at a bar to see its names and bytes.</p>"
    for plan in facts.plans:
        yield f"<h3>{escape(plan.title)}: {len(plan.uses)} uses, {escape(plan.window)}</h3>"
        yield f'<div class="scroll">{timeline(plan, facts.is_verbose)}</div>'
        if plan.kept:
            yield f"<p>{escape(plan.kept)}</p>"


def _choices(choices: Iterable[str]) -> str:
    pairs = (choice.partition(": ") for choice in choices)
    return f"<dl>{''.join(f'<dt>{escape(what)}</dt><dd>{escape(why)}</dd>' for what, _, why in pairs)}</dl>"

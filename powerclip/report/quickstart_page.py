"""The quickstart's report: one HTML file, self-contained, that a newcomer can read from top to bottom."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from powerclip.compare.comparison import Line, show
from powerclip.report.charts import line_chart

Curve = Sequence[tuple[float, float]]

COLOURS = {"CLIP": "#c2571a", "PowerCLIP-R": "#1f5fbf"}

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --faint: #5f6874; --rule: #e3e6ea; --paper: #ffffff; --band: #f6f7f9;
        --clip: #c2571a; --ours: #1f5fbf; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.6 -apple-system, "Segoe UI", Roboto,
       "Helvetica Neue", "Noto Sans", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 10px; }
h2 { font-size: 20px; margin: 44px 0 10px; letter-spacing: -0.01em; }
p { margin: 0 0 12px; max-width: 72ch; }
.lead { font-size: 18px; color: var(--faint); max-width: 66ch; }
th, td, .whole { white-space: nowrap; }
.ours { color: var(--ours); } .clip { color: var(--clip); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 15px; }
th, td { padding: 5px 12px; text-align: right; }
th:first-child, td:first-child { text-align: left; padding-left: 10px; }
thead th { border-bottom: 2px solid var(--ink); font-weight: 600; vertical-align: bottom; }
tbody tr + tr td { border-top: 1px solid var(--rule); }
tr.group td { background: var(--band); font-weight: 600; border-top: 1px solid var(--rule); padding-top: 7px; }
tr.sum td { border-top: 1.5px solid #9aa3ae !important; }
td.chance { color: var(--faint); }
td.best { font-weight: 700; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(270px, 1fr)); gap: 22px; }
.chart { width: 100%; height: auto; display: block; }
.chart text { font-family: inherit; font-size: 11px; }
.chart .title { font-weight: 600; font-size: 12.5px; fill: var(--ink); }
.chart .tick { fill: var(--faint); } .chart .name { font-weight: 600; }
.chart .end { text-anchor: end; } .chart .mid { text-anchor: middle; }
.chart .rule { stroke: var(--rule); stroke-width: 1; }
.chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
figure { margin: 14px 0 8px; }
figure img { width: 100%; min-width: 720px; height: auto; display: block; }
figcaption, .note { color: var(--faint); font-size: 14px; line-height: 1.5; margin-top: 8px; max-width: 84ch; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 8px 22px; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; max-width: 68ch; }
@media (max-width: 640px) {
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 10px; } main { padding: 24px 14px; }
}
footer { margin-top: 48px; padding-top: 14px; border-top: 1px solid var(--rule); color: var(--faint); font-size: 14px; }
code { font: 0.92em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; background: var(--band);
       padding: 1px 5px; border-radius: 4px; }
"""


@dataclass(frozen=True)
class Report:
    """What the page shows."""

    lines: Sequence[Line]
    curves: Mapping[str, Mapping[str, Curve]]  # title → model → (step, value)
    heatmaps: bytes  # PNG
    regions: int  # M
    steps: int
    batch_size: int
    parameters: int
    seeds: Sequence[int]
    counts: Mapping[str, int]  # what the evaluation looked at
    machine: str
    command: str


def render(report: Report) -> str:
    """The page as HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>CLIP and PowerCLIP-R on the embedded scenes</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>CLIP and PowerCLIP-R on the embedded scenes</h1>
<p class="lead">{verdict(report.lines)}</p>
{_explanation(report)}
<h2>Results</h2>
<div class="scroll">{_table(report.lines)}</div>
<p class="note">{_table_note(report)}</p>
<h2>How they learned</h2>
<div class="charts">{"".join(_charts(report.curves))}</div>
<p class="note">{_chart_note(report)}</p>
<h2>Where the phrases are found</h2>
<figure><div class="scroll"><img alt="Heatmaps of captions and their phrases for both models"
src="data:image/png;base64,{b64encode(report.heatmaps).decode()}"></div>
<figcaption>Cosine between each patch and the caption or phrase above the panel, for scenes that neither model has
seen. Red is the panel's highest value and blue its lowest, the cross marks the highest patch, the white frame the
object that the phrase names. Phrases are read in their caption, as the alignment loss reads
them.</figcaption></figure>
<h2>What the numbers mean</h2>
{_glossary(report.counts)}
<footer>{_footer(report)}</footer>
</main>
</body>
</html>
"""


def verdict(lines: Sequence[Line]) -> str:
    """One sentence that says who is ahead, as measured."""
    contests = [line for line in lines if line.unit == "%"]
    ours = sum(line.ahead == "ours" for line in contests)
    theirs = sum(line.ahead == "baseline" for line in contests)
    even = len(contests) - ours - theirs
    text = (
        f'Same towers, same scenes, same number of steps: of {len(contests)} measures <b class="ours">PowerCLIP-R</b> '
        f'is ahead on {ours} and <b class="clip">CLIP</b> on {theirs}'
    )
    return text + (f"; {even} {'is' if even == 1 else 'are'} level." if even else ".")


def _explanation(report: Report) -> str:
    sets = 2**report.regions
    return f"""<h2>What is compared</h2>
<p><b class="clip">CLIP</b> turns a picture into one vector and a caption into another, and learns to bring those that
belong together close to each other. Nothing tells it <em>which part</em> of the picture a word speaks of.</p>
<p><b class="ours">PowerCLIP-R</b> learns the same and looks inside as well. From the picture it takes {report.regions}
regions (the R: boxes drawn at random), from the caption every phrase of its parse tree: “a red star”, “left of a blue
ring”, the whole sentence. A phrase may speak of several regions at once, so every <em>set</em> of regions, the
powerset, is asked for its best phrase: {report.regions} regions make {sets:,} sets. They are not enumerated: a
nonlinear aggregation of just {report.regions} similarities for each phrase stands in for all of them. And each phrase
is asked for its best region. A picture matches its caption when the regions find their phrases and the phrases find
their regions.</p>
<p>Used afterwards, the two are alike: two towers, one vector for a picture and one for a text, no boxes and no
trees.</p>"""


def _table(lines: Sequence[Line]) -> str:
    rows = []
    group = ""
    for line in lines:
        if line.group != group:
            group = line.group
            rows.append(f'<tr class="group"><td colspan="5">{escape(group)}</td></tr>')
        chance = "" if line.chance is None else f"{line.chance:.1f}"
        colour = {"ours": ' class="ours"', "baseline": ' class="clip"'}.get(line.ahead, "")
        best = ' class="best"'
        kind = ' class="sum"' if line.label == "mean" else ""
        rows.append(
            f"<tr{kind}><td>{escape(line.label)}</td>"
            f'<td class="chance">{chance}</td>'
            f"<td{best if line.ahead == 'baseline' else ''}>{show(line.baseline, line.unit)}</td>"
            f"<td{best if line.ahead == 'ours' else ''}>{show(line.ours, line.unit)}</td>"
            f"<td{colour}>{signed(line.difference, line.unit)}</td></tr>"
        )
    return (
        '<table><thead><tr><th></th><th>Chance</th><th class="clip">CLIP</th><th class="ours">PowerCLIP-R</th>'
        f"<th>Difference</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def signed(value: float, unit: str = "%") -> str:
    """A difference with its sign, a true minus; plain 0.0 when it rounds to nothing. Times as `show` has them."""
    digits, ending = (0, " s") if unit == "s" else (1, "")
    text = f"{value:+.{digits}f}".replace("-", "−")
    return (text[1:] if not float(text[1:]) else text) + ending


def _charts(curves: Mapping[str, Mapping[str, Curve]]) -> list[str]:
    return [f"<div>{chart}</div>" for title, series in curves.items() if (chart := line_chart(title, series, COLOURS))]


def _table_note(report: Report) -> str:
    seeds = len(report.seeds)
    spread = f"; mean ± standard deviation over {seeds} seeds" if seeds > 1 else f"; seed {report.seeds[0]}"
    caution = (
        "" if seeds > 1 else " One seed says little about small differences: <code>--seeds 3</code> shows the spread."
    )
    return f"Per cent, higher is better{spread}. Bold is ahead.{caution}"


def _chart_note(report: Report) -> str:
    of = f" of seed {report.seeds[0]}" if len(report.seeds) > 1 else ""
    return (
        f"Training{of}. The CLIP loss is the term that both share. The alignment loss and the violation rate "
        "(share of pictures and captions that prefer some wrong partner of their batch to the right one) belong to "
        '<span class="whole">PowerCLIP-R</span>.'
    )


def _glossary(counts: Mapping[str, int]) -> str:
    return f"""<dl>
<dt>Retrieval</dt><dd>Among {counts["retrieval"]:,} new scenes, find the caption of a picture and the picture of a
caption; R@k: the right one is among the k best.</dd>
<dt>Zero-shot</dt><dd>Name the object in {counts["zero_shot"]:,} pictures that show one of {counts["classes"]}
colour–shape pairs, none of which occurred in training, though each colour and each shape did.</dd>
<dt>Composition</dt><dd>Prefer the caption to one that is false in a single respect, made in the seven ways of
SugarCrepe ({counts["composition"]:,} comparisons). A draw counts as wrong.</dd>
<dt>Pointing game</dt><dd>The patch that is most similar to a phrase lies inside the object which the phrase names
({counts["pointing"]:,} phrases), or inside any object of the picture: objects stand out, and untrained towers find
one. The phrase is embedded from the words of its caption, or as a text on its own.</dd>
</dl>"""


def _footer(report: Report) -> str:
    seeds = ", ".join(map(str, report.seeds))
    return (
        f"{report.steps:,} steps of {report.batch_size} pairs for each model; {report.parameters / 1e6:.1f} million "
        f"parameters; seed{'s' if len(report.seeds) > 1 else ''} {seeds}; {escape(report.machine)}. "
        f"Made by <code>{escape(report.command)}</code>."
    )

"""The quickstart's report: one HTML file, self-contained, that a newcomer can read from top to bottom."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from powerclip.report.charts import Curve, line_chart
from powerclip.report.page import html_page
from powerclip.report.table import Table

TITLE = "CLIP and PowerCLIP on the embedded scenes"
COLOURS = {"CLIP": "#c2571a", "PowerCLIP": "#1f5fbf"}
CLASSES = {"CLIP": "clip", "PowerCLIP": "powerclip"}  # of heads and names in the page's CSS

STYLE = "".join(
    f"th.{name}, b.{name}, td.ahead-{name} {{ color: {COLOURS[model]}; }}\n" for model, name in CLASSES.items()
)


@dataclass(frozen=True)
class Report:
    """What the page shows."""

    table: Table
    measures: int  # in the table, on which a model can be ahead
    ahead: Mapping[str, int]  # model → on how many of them it is
    curves: Mapping[str, Mapping[str, Curve]]  # title → model → (step, value)
    heatmaps: bytes  # PNG
    regions: int  # M
    steps: int
    batch_size: int
    parameters: int
    seeds: Sequence[int]
    counts: Mapping[str, int]  # of what the evaluation was made on
    machine: str
    command: str


def render(report: Report) -> str:
    """The page as HTML."""
    charts = "".join(
        f"<div>{chart}</div>"
        for title, series in report.curves.items()
        if (chart := line_chart(title, series, COLOURS))
    )
    body = f"""<h1>{TITLE}</h1>
<p class="lead">{verdict(report.measures, report.ahead)}</p>
{_explanation(report.regions)}
<h2>Results</h2>
{report.table.html()}
<p class="note">{_table_note(report.seeds)}</p>
<h2>Training</h2>
<div class="charts">{charts}</div>
<p class="note">{_chart_note(report.seeds)}</p>
<h2>Where each model finds the phrases</h2>
<figure><div class="scroll"><img alt="Heatmaps of captions and their phrases for both models"
src="data:image/png;base64,{b64encode(report.heatmaps).decode()}"></div>
<figcaption>Cosine similarity between each patch and the caption or phrase above the panel, for scenes that neither
model was trained on. Red is the panel's highest value and blue its lowest, the cross marks the highest patch, the white
frame the object that the phrase names. Phrases are embedded from the words of their caption, as in the alignment
loss.</figcaption></figure>
<h2>What the numbers mean</h2>
{_glossary(report.counts)}
<footer>{_footer(report)}</footer>"""
    return html_page(TITLE, body, style=STYLE)


def verdict(measures: int, ahead: Mapping[str, int]) -> str:
    """One sentence that says who is ahead, as measured."""
    level = measures - sum(ahead.values())
    text = (
        f"Same towers, same scenes, same number of steps: of {measures} measures {_name('PowerCLIP')} is ahead on "
        f"{ahead['PowerCLIP']} and {_name('CLIP')} on {ahead['CLIP']}"
    )
    return text + (f"; {level} {'is' if level == 1 else 'are'} level." if level else ".")


def _name(model: str) -> str:
    return f'<b class="{CLASSES[model]}">{model}</b>'


def _explanation(regions: int) -> str:
    return f"""<h2>What is compared</h2>
<p>{_name("CLIP")} embeds an image as one vector and a caption as another, and is trained to bring the vectors of a
matching pair close together. Nothing in its loss says <em>which part</em> of the image a word refers to.</p>
<p>{_name("PowerCLIP")} is trained with the same loss and a second one on parts. From the image it takes {regions}
regions, by default every patch, from the caption every phrase of its parse tree: “a red star”, “left of a blue ring”,
the whole sentence. A phrase may refer to several regions at once, so the loss looks for the best phrase of every
<em>set</em> of regions, the powerset: {regions} regions make 2<sup>{regions}</sup> sets. They are not enumerated: a
nonlinear aggregation of {regions} similarities for each phrase approximates all of them. The loss also looks for the
best region of each phrase. Regions and phrases of a matching pair should score higher than those of any other pair.</p>
<p>The trained models are used in the same way: two towers, one vector for an image and one for a text, no boxes and no
trees.</p>"""


def _table_note(seeds: Sequence[int]) -> str:
    if len(seeds) > 1:
        return f"Percent, higher is better; mean ± standard deviation over {len(seeds)} seeds. Bold is ahead."
    return (
        f"Percent, higher is better; seed {seeds[0]}. Bold is ahead. One seed says little about small differences: "
        "<code>--seeds 3</code> shows the standard deviation."
    )


def _chart_note(seeds: Sequence[int]) -> str:
    which = f"Seed {seeds[0]}. " if len(seeds) > 1 else ""
    return (
        f"{which}The CLIP loss is the term that both share. The alignment loss and the violation rate "
        "(share of images and captions for which some wrong partner in the batch scores higher than the right one) "
        'belong to <span class="whole">PowerCLIP</span>.'
    )


def _glossary(counts: Mapping[str, int]) -> str:
    return f"""<dl>
<dt>Retrieval</dt><dd>Among {counts["scenes"]:,} new scenes, find the caption of an image and the image of a caption;
R@k: the right one is among the k best.</dd>
<dt>Zero-shot</dt><dd>Name the object in {counts["zero_shot_images"]:,} images that show one of {counts["classes"]}
colour–shape pairs, none of which occurred in training, though each colour and each shape did.</dd>
<dt>Composition</dt><dd>Prefer the caption to one that is false in a single respect, made in the seven ways of
SugarCrepe ({counts["comparisons"]:,} comparisons). A tie counts as wrong.</dd>
<dt>Pointing game</dt><dd>The patch that is most similar to a phrase lies inside the object that the phrase names
({counts["phrases"]:,} phrases), or inside any object of the image: objects stand out, and even untrained towers find
one. The phrase is embedded from the words of its caption, or as a text on its own.</dd>
</dl>"""


def _footer(report: Report) -> str:
    seeds = ", ".join(map(str, report.seeds))
    return (
        f"{report.steps:,} steps of {report.batch_size} pairs for each model; {report.parameters / 1e6:.1f} million "
        f"parameters; seed{'s' if len(report.seeds) > 1 else ''} {seeds}; {escape(report.machine)}. "
        f"Made by <code>{escape(report.command)}</code>."
    )

"""The frame of every HTML page that is written: one self-contained file, the same look for all."""

from __future__ import annotations

from html import escape

INK, FAINT, LINE, BAND = "#1b1f24", "#5f6874", "#e3e6ea", "#f6f7f9"

STYLE = f"""
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: #fff; color: {INK}; font: 16px/1.6 -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
       "Noto Sans", "DejaVu Sans", Arial, sans-serif; }}
main {{ max-width: 980px; margin: 0 auto; padding: 40px 24px 64px; }}
main.wide {{ max-width: none; }}
h1 {{ font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 10px; }}
h2 {{ font-size: 20px; margin: 44px 0 10px; letter-spacing: -0.01em; }}
p {{ margin: 0 0 12px; max-width: 72ch; }}
.lead {{ font-size: 18px; color: {FAINT}; max-width: 66ch; }}
th, td, .whole {{ white-space: nowrap; }}
.scroll {{ overflow-x: auto; }}
.scroll + p {{ margin-top: 14px; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 15px; }}
.wide table {{ width: auto; font-size: 13px; }}
th, td {{ padding: 5px 12px; text-align: right; }}
.wide th, .wide td {{ padding: 3px 7px; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 10px; position: sticky; left: 0; background: #fff; }}
thead th {{ font-weight: 600; vertical-align: bottom; }}
thead tr:last-child th {{ border-bottom: 2px solid {INK}; }}
thead th.group {{ text-align: center; border-bottom: 1px solid {FAINT}; }}
th.start, td.start {{ padding-left: 18px; }}
tbody tr + tr td {{ border-top: 1px solid {LINE}; }}
tr.section td:first-child {{ background: {BAND}; font-weight: 600; padding-top: 7px; }}
tr.mean td {{ border-top: 1.5px solid #9aa3ae !important; }}
tr.measured td, tr.measured td:first-child {{ background: #e0f7fa; }}
td.faint {{ color: {FAINT}; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(270px, 1fr)); gap: 22px; }}
.chart {{ width: 100%; height: auto; display: block; }}
.chart text {{ font-family: inherit; font-size: 11px; }}
.chart .title {{ font-weight: 600; font-size: 12.5px; fill: {INK}; }}
.chart .tick {{ fill: {FAINT}; }} .chart .name {{ font-weight: 600; }}
.chart .end {{ text-anchor: end; }} .chart .mid {{ text-anchor: middle; }}
.chart .rule {{ stroke: {LINE}; stroke-width: 1; }}
.chart .line {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }}
figure {{ margin: 14px 0 8px; }}
figure img {{ width: 100%; min-width: 720px; height: auto; display: block; }}
figcaption, .note {{ color: {FAINT}; font-size: 14px; line-height: 1.5; margin-top: 8px; max-width: 84ch; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 8px 22px; margin: 0; }}
dt {{ font-weight: 600; }} dd {{ margin: 0; max-width: 68ch; }}
footer {{ margin-top: 48px; padding-top: 14px; border-top: 1px solid {LINE}; color: {FAINT}; font-size: 14px; }}
code {{ font: 0.92em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; background: {BAND};
       padding: 1px 5px; border-radius: 4px; }}
@media (max-width: 640px) {{
  dl {{ grid-template-columns: 1fr; gap: 0; }} dd {{ margin-bottom: 10px; }} main {{ padding: 24px 14px; }}
}}
"""


def html_page(title: str, body: str, *, style: str = "", wide: bool = False) -> str:
    """A page of its own; `style` adds CSS to the shared one, `wide` gives large tables the whole window."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<main{' class="wide"' if wide else ""}>
{body}
</main>
</body>
</html>
"""

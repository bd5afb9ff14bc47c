"""The table of how abilities grow: what is finished is shown, by method and number of pictures."""

from growth import ABILITIES, draw, growth_table, read_curves


def settings(**of_names: float) -> dict:
    """A study's settings, each with one run whose scores are all the same number."""
    scores = {f"scenes/{score}": 0.0 for score, _ in ABILITIES.values()}
    scores |= {f"scenes/{without}": 0.4 for _, without in ABILITIES.values() if isinstance(without, str)}
    return {
        name.replace("_", " "): {"runs": {"0": {"scores": dict.fromkeys(scores, value) | {"retrieval/x": 1.0}}}}
        for name, value in of_names.items()
    }


def test_methods_have_a_row_for_each_count_in_order_and_unfinished_runs_none():
    studied = settings(one_1M=0.6, clip_300k=0.2, clip_100k=0.1) | {"any 1M": {"runs": {"0": {"error": "stopped"}}}}
    rows = growth_table(read_curves(studied)).markdown().splitlines()[2:]
    assert [row.split(" | ")[:3] for row in rows[1:]] == [
        ["| CLIP", "100,000", "10.0"],
        ["| CLIP", "300,000", "20.0"],
        ["| one region", "1,000,000", "60.0"],
    ]


def test_the_figure_has_a_panel_for_each_ability(tmp_path):
    draw(read_curves(settings(one_1M=0.6, clip_300k=0.2)), tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"

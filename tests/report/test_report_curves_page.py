from __future__ import annotations

import re

from powerclip.report.curves_page import curves_page


def test_the_losses_that_a_method_adds_have_their_curves():
    rows = [{"step": step, "clip": 4, "local": 3, "simclr": 2, "byol": 1, "unknown": 0} for step in (1, 2)]
    page = curves_page({"made up": [rows]})
    assert re.findall(r'aria-label="([^"]+)"', page) == ["CLIP loss", "Local loss", "SimCLR loss", "BYOL loss"]

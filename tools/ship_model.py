"""Put a trained run's model into the package, in float16, with its card: the model that commands take by its name.

    powerclip train --recipe quickstart/shipped -o runs/shipped
    python tools/ship_model.py runs/shipped

Its scores are those of the run's own evaluation. A model of more than 10 MB is refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from powerclip.encoders import load, save
from powerclip.errors import UserError
from powerclip.export.card import describe_run, model_card
from powerclip.runtime.files import write_atomic
from powerclip.runtime.shipped import MODEL, MODEL_FOLDER

MOST_BYTES = 10_000_000
ABOUT = (
    "## What it is for\n\n"
    "To see at once what phrases that point look like, without training: `powerclip ground`, `powerclip demo` and the "
    "first example of the README. It knows the scenes that `powerclip.data.scenes` draws, their words and nothing "
    "else: on photographs it is worth nothing. MIT licence, as the package; no data of others was used."
)


def main(arguments: list[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run of recipes/quickstart/shipped.yaml")
    parser.add_argument("-o", "--output", type=Path, default=MODEL_FOLDER, help="the folder to write")
    options = parser.parse_args(arguments)
    facts = describe_run(options.run)
    if facts is None or not facts.scores:
        raise UserError(f"{options.run}: no finished run with scores")
    model, _, _ = load(options.run)
    model.clip.half()
    size = sum(value.nbytes for value in model.clip.state_dict().values())
    if size > MOST_BYTES:
        raise UserError(f"{options.run}: {size / 1e6:.1f} MB in float16, more than {MOST_BYTES / 1e6:.0f}")
    card = model_card(MODEL, model, facts, contents=["open_clip"])
    head, _, rest = card.partition("## To fill in before you publish")
    head = head.replace("license: other\nlicense_name: fill-in", "license: mit")
    card = f"{head}{ABOUT}\n\n## Training{rest.partition('## Training')[2]}"
    card = card.replace(f"local-dir:{MODEL}", MODEL, 1)  # this package knows it by its name
    save(model, options.output)
    write_atomic(options.output / "README.md", card.encode())
    print(f"wrote {options.output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")

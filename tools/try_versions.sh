#!/usr/bin/env bash
# Install powerclip into a fresh environment and run a part of the tests that touches every dependency.
#
#   tools/try_versions.sh 3.11 lowest-direct   # the lower bounds of pyproject.toml
#   tools/try_versions.sh 3.13 highest         # another Python, with the newest versions
#
# Needs uv and that Python. Downloads up to 4 GB; takes a few minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?which Python, such as 3.11} resolution=${2:-lowest-direct}
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT

uv venv --quiet --python "$python" "$folder/venv"
export VIRTUAL_ENV=$folder/venv OMP_NUM_THREADS=1
uv build --quiet --wheel --out-dir "$folder/dist" .
# Bounds of a wheel would count as indirect: uv takes the lowest only of what it is asked for itself.
uv pip install --quiet --resolution "$resolution" --requirements pyproject.toml
uv pip install --quiet --no-deps "$folder"/dist/powerclip-*.whl
uv pip freeze > "$folder/installed.txt"
grep -iE "^($(sed -n '/^dependencies = \[/,/^\]/s/^    "\([A-Za-z0-9_.-]*\).*/\1/p' pyproject.toml | tr '_\n' '-|')powerclip)(==| @)" \
  "$folder/installed.txt"
# The tools of the tests have no lower bounds of their own: the newest that go with what is installed.
uv pip install --quiet --constraint "$folder/installed.txt" hypothesis pytest pytest-timeout requests

# Away from the checkout, so that the installed package is tested; recipes and studies are then the wheel's.
cp -r tests docs benchmarks README.md CONTRIBUTING.md CHANGELOG.md CITATION.cff pyproject.toml "$folder"
cd "$folder"
"$VIRTUAL_ENV/bin/python" -m pytest --no-header -p no:cacheprovider \
  tests/alignment/test_alignment_loss.py tests/alignment/test_alignment_regions.py \
  tests/annotate/test_annotate_parsers_embedded.py tests/annotate/test_annotate_segmenters_others.py \
  tests/annotate/test_annotate_shard_list.py tests/compare/test_compare_significance.py \
  tests/compare/test_compare_table.py tests/data tests/encoders tests/objectives tests/report tests/test_settings.py \
  tests/train/test_train_metrics.py tests/train/test_train_checkpoint.py tests/train/test_train_loop.py

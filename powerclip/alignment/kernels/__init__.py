"""Fast paths of the scores: one operator a file.

| file               | scores                        | gradient                           | runs on    |
|--------------------|-------------------------------|------------------------------------|------------|
| `nla_all.py`       | NLA of all pairs              | its own kernel                     | NVIDIA GPU |
| `nla_all_cpu.py`   | NLA of all pairs              | closed form, recomputed in blocks  | CPU        |
| `nla_pairs.py`     | NLA of chosen pairs           | with the forward                   | NVIDIA GPU |
| `exact_all.py`     | exact, of all pairs           | `exact_all_grad.py`                | NVIDIA GPU |
| `exact_all_grad.py`| –                             | winners counted in registers       | NVIDIA GPU |
| `exact_all_cpu.py` | exact, of all pairs           | winners counted, in blocks         | CPU        |
| `exact_pairs.py`   | exact, of chosen pairs        | with the forward                   | NVIDIA GPU |
| `best_sets.py`     | (each node's best set)        | not needed                         | NVIDIA GPU |
| `split_halves.py`  | (float32 as two float16)      | not needed                         | NVIDIA GPU |

`pairs.py`, `powerset_sums.py`, `set_sums.py` and `wins.py` hold parts of them. `powerclip/alignment/score.py` calls
them. The Triton ones are imported only where they run: importing this package does not import Triton.
"""

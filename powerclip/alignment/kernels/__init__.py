"""Fast paths of the powerset similarities: one file for each operator, its name shared by its test.

The Triton ones are imported only where they run (`powerclip/alignment/backends.py` says where): importing this package
does not import Triton.
"""

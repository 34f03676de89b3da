"""Interfaces of other packages over qsim, for scripts that were written for those.

Nothing here is imported with `qsim`; say which one you mean: `from qsim.compat import qtorch`.
"""

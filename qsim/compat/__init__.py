"""Interfaces of other packages on top of qsim, for scripts written for those packages.

`import qsim` does not import them; import the one you need: `from qsim.compat import qtorch`.
"""

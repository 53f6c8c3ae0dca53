"""Studies: how GEMM behaves on this machine, as rows that repeat and a page of figures that says what they show.

A study is one file of `isogemm.study.catalog` that declares cases, what is measured and its figures; what measures them
is `isogemm.study.engine` and `isogemm.lab`. ``isogemm study --list`` names them.
"""

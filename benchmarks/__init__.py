"""Benchmarks: a file a case, each with ``run(bench)``; `mpishard bench`, or ``python -m benchmarks``, runs them."""

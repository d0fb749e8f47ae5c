"""Benchmarks of ``kfac_optim``: one module for each question, one shared harness, JSON out, plots from the JSON.

``python -m benchmarks --help`` lists the questions. They need ``pip install -e ".[benchmarks]"``, and cart-pole
``".[benchmarks,reinforcement]"``. A new question is a new module with ``run(args)``, its arguments in ``options.py``,
one line in ``__main__.py``, and its stage in ``stages.py``.
"""

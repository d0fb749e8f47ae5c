"""Benchmarks of ``kfac_optim``: one module for each question, one shared harness, JSON out, plots from the JSON.

    python -m benchmarks compare            which optimizer gets to the same quality in the fewest steps and seconds?
    python -m benchmarks scoreboard         how does K-FAC stand over all problems that compare was run on?
    python -m benchmarks batch-size         how many steps does it take at each batch size, with SGD and with K-FAC?
    python -m benchmarks quickstart         does K-FAC beat a tuned SGD on real data?
    python -m benchmarks autoencoders       which estimate, inverse and damping train deep autoencoders?
    python -m benchmarks pinn               which optimizer trains physics-informed networks to the smallest error?
    python -m benchmarks cart-pole          how many steps does an actor-critic need to balance a pole?
    python -m benchmarks step-cost          what does a step cost, and how far is that from the arithmetic floor?
    python -m benchmarks accelerator        what does a step cost on an accelerator, and which variant is best?
    python -m benchmarks preconditioning    does it precondition at all, and is the cold start safe?
    python -m benchmarks refresh            how long is the longest step, together, staggered and in the background?
    python -m benchmarks distributed        what does it send, hold and cost on several processes?
    python -m benchmarks scaling            how does it scale to 1,024 ranks, as plans predict it?
    python -m benchmarks faults             does a run whose ranks are killed go on as if nothing had happened?
    python -m benchmarks everything         what are the figures of all of these, made anew?

They need ``pip install -e ".[benchmarks]"``, and cart-pole ``".[benchmarks,reinforcement]"``. A new question is a new
module with ``run(args)``, its arguments in ``options.py``, one line in ``__main__.py``, and its stage in ``stages.py``.
"""

"""Copies between an engine's pages and a lower tier: planned when submitted, run in order beside
the model. Imports torch.

The files; each imports only what is listed above it:

    queue.py          jobs in order on a thread
    canonical.py      an engine's pages as int8 tensors, and which of them a group uses
    rows.py           rows of host memory, gathered and scattered
    plan.py           a job checked and cut into chunks
    staging.py        runs a plan in host memory
    cuda_staging.py   runs a plan beside a GPU
    runner.py         plan, stager and queue together
"""

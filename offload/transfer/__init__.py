"""Copies between an engine's pages and a lower tier; all of it but the queue imports torch.

The files; each imports only what is listed above it:

    queue.py          jobs in order on a thread
    canonical.py      an engine's pages as int8 tensors, and which of them a group uses
    rows.py           rows of host memory, gathered and scattered
    plan.py           a job checked and cut into chunks
    staging.py        runs a plan on a cache in host memory
    cuda_staging.py   runs a plan on a cache on a CUDA device
    runner.py         plan, stager and queue together
"""

"""Request body -> decision; writes no metrics.

The files; each imports only what is listed above it:

    admission.py         how many requests are let in, and whether any
    recent_prefixes.py   which prefixes were just sent where
    models.py            models and every name they go by, each with index and tokenisation
    planner.py           the decision: hits, load, ranking
    tokenizer_check.py   does every replica tokenise as the router does?
    dispatcher.py        a request's body -> a decision
"""

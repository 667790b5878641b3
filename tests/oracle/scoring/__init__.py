"""The built-in policies in plain Python. The compiled ones are tested to equal them.

The files; each imports only what is listed above it:

    standings.py  the candidates of a decision as columns that can be changed
    delay.py      the least delay for this request and for others: derives the cost
    ranking.py    leaves out those that cannot serve
    policies.py   least wait, round robin, random, least loaded, sessions
"""

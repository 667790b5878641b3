"""Ours beside its peers, the same work in the same run: `make bench-peers`.

replica.c        a replica that computes nothing, for the proxies
load.c           a load generator
programs.py      builds those two; processes, their CPU time and memory
publishing.py    engines' event streams, written ahead and sent as fast as they are read
contestants.py   how each router is started, what it is asked and what it answers
indexing.py      rows of the index: events in, matches out
proxying.py      rows of the proxy: requests and streams passed on
run.py           all rows, then the table
"""

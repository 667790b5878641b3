"""Mutation testing: every small mistake in the core must fail a test.

`make mutants` changes one operator, constant or condition at a time in the files of `targets.py`,
runs the tests that mirror the file, and lists the mutations that no test noticed. Those that change
nothing a caller can see are listed in `equal.yaml`, each with the reason.

The files; each imports only what is listed above it:

    mutate.py     a file's source -> every single mutation of it
    mutate_cpp.py the same for C++, line by line
    targets.py    which files are mutated, and which tests must notice
    trial.py      one mutation in a copy of the tree, compiled if it is C++: killed or not
    __main__.py   options, workers, results
"""

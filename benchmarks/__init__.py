"""One script a question; each prints one JSON line per figure."""

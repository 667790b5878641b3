"""One script per question; each prints one JSON line per figure."""

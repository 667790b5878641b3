"""What each kind of attention needs of the KV cache: one file per kind behind one base."""
